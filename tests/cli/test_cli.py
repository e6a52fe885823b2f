"""The command line as a person uses it: what it prints, where, and with which exit code."""

import json
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from commands import call
from curvescope.cli import doctor
from curvescope.studies.hvp.analysis import SHAPES

ROOT = Path(__file__).parents[2]
SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"
QUICK = [
    *("--set", "num_steps=8", "--set", "num_probes=2", "--set", "num_eigenvalues=1"),
    *("--set", "num_trace_probes=2", "--set", "num_map_probes=2", "--set", "batch_size=64"),
    *("--set", "max_products=8", "--blocks", "L0.W_[QV]"),
]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_help_imports_no_torch_and_is_quick():
    code = (
        "import sys, curvescope\n"
        "try:\n    from curvescope.cli import main; main(['--help'])\n"
        "except SystemExit: pass\n"
        "try:\n    main(['list'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib', 'pandas') if m in sys.modules], file=sys.stderr)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "run" in done.stdout
    assert "spectrum" in done.stdout
    assert time.monotonic() - start < 5  # on a machine that does other things; alone it takes 0.2 s


def test_a_spectrum_loads_no_package_that_it_does_not_use(small, tmp_path):
    words = ["run", "spectrum", str(small), "--data", "task:addition", "--out", str(tmp_path), *QUICK]
    code = (
        "import sys\nfrom curvescope.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end: assert not end.code\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('curvescope.')}\n"
        "print(ours, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"\w+", done.stderr))
    assert {"algorithms", "operators", "runs"} <= loaded
    assert loaded.isdisjoint({"geometry", "distributed", "closed_form", "monitor", "optim", "report"})


def test_python_dash_m_works():
    done = subprocess.run([sys.executable, "-m", "curvescope", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("curvescope ")


def test_info_prints_a_table_and_json(small, capsys):
    code, out, _ = call("info", small, capsys=capsys)
    assert code == 0
    assert "L0.W_Q" in out
    assert "4 × 4" in out
    code, out, _ = call("info", small, "--json", "--heads", capsys=capsys)
    table = json.loads(out)
    whole = [row for row in table["blocks"] if ".h" not in row["block"]]
    assert sum(row["parameters"] for row in whole) == table["parameters"]
    assert sum(row["share"] for row in whole) == pytest.approx(1)
    assert any(row["block"] == "L0.h0.W_Q" for row in table["blocks"])


def test_list_prints_json(capsys):
    code, out, _ = call("list", "--json", capsys=capsys)
    assert code == 0
    assert {"studies", "papers", "models", "corpora", "tasks", "losses"} == set(json.loads(out))


def test_doctor_checks_a_product(capsys):
    code, out, _ = call("doctor", "--json", capsys=capsys)
    rows = {row["what"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["engine autograd on cpu"]["state"] == "ok"


def test_doctor_lists_what_the_package_itself_asks_for(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(f'{one}; extra == "{e}"' for e in extras for one in extras[e])]
    monkeypatch.setattr("curvescope.core.requirements.requires", lambda package: asked)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    rows = {what: (state, words) for what, state, words in doctor._packages()}
    for one in project["dependencies"]:
        assert rows[re.split("[<>=]", one)[0]][0] == "broken"
    for extra in set(extras) - {"dev", "docs"}:
        for one in extras[extra]:
            state, words = rows[re.split("[<>=]", one)[0]]
            assert (state, words.endswith(f"extra '{extra}')")) == ("absent", True)
    assert rows["peft"][1] == "(LoRA and other adapters, extra 'peft')"
    assert "pytest" not in rows


def test_doctor_of_a_package_that_is_not_installed(monkeypatch):
    def nothing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("curvescope.core.requirements.requires", nothing)
    rows = {what: state for what, state, _ in doctor._packages()}
    assert rows["dependencies"] == "absent"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "few_sequences")
def test_run_then_report(small, tmp_path, capsys):
    words = ["run", "spectrum", small, "--data", "task:addition", "--out", tmp_path / "runs", *QUICK]
    code, out, err = call(*words, capsys=capsys)
    assert code == 0, err
    path = out.strip().splitlines()[-1]
    assert "largest eigenvalue" in out
    assert "12/12" in err
    code, out, err = call("report", path, "--page", tmp_path / "page.html", capsys=capsys)
    assert code == 0, err
    assert str(tmp_path / "page.html") in out
    again = ["run", "spectrum", "--config", f"{path}/config.toml", "--out", tmp_path / "again", "--quiet"]
    code, _, err = call(*again, capsys=capsys)
    assert code == 0, err
    assert err == ""


BAD = {
    "unknown command": (["spectre"], 2, "No such command"),
    "unknown option": (["list", "--color"], 2, "no such option --color\nhint: known: --json, --help; "),
    "option with a slip": (["report", "--frobnicate"], 2, "--frobnicate\nhint: did you mean '--force'?; "),
    "no integer": (
        ["run", "spectrum", "--tokens", "many"],
        2,
        "expected an integer for --tokens, got 'many'",
    ),
    "no integer behind =": (["run", "spectrum", "--seed=x"], 2, "expected an integer for --seed, got 'x'"),
    "no number": (["diagnose", "--lr", "x"], 2, "expected a number for --lr, got 'x'"),
    "option without a value": (
        ["run", "spectrum", "--tokens"],
        2,
        "expected a value after --tokens, got none",
    ),
    "no study": (["run"], 2, "expected STUDY, got nothing\nhint: curvescope run --help"),
    "too many words": (["list", "foo", "bar"], 2, "got foo bar"),
    "value for a switch": (["list", "--json=x"], 2, "error: "),
    "unknown study": (["run", "spectral"], 2, "expected a study, got 'spectral'"),
    "unknown model": (["info", "tiny-gtp"], 2, "did you mean 'tiny-gpt'"),
    "unknown model in a run": (["run", "spectrum", "gpt-9"], 2, "expected a bundled model"),
    "unknown revision": (["info", "tiny-gpt", "--revision", "late"], 2, "known: initial"),
    "revision of a file": (["info", "SMALL", "--revision", "early"], 2, "bundled model with revision"),
    "unknown corpus": (["run", "spectrum", "--data", "shakespear"], 2, "expected a corpus"),
    "unknown task": (["run", "spectrum", "SMALL", "--data", "task:additoin"], 2, "did you mean 'addition'"),
    "text without tokenizer": (["run", "spectrum", "SMALL"], 2, "has no tokenizer"),
    "unknown block": (
        ["run", "spectrum", "SMALL", "--data", "task:addition", "--blocks", "L9.*"],
        2,
        "no block",
    ),
    "unknown setting": (["run", "spectrum", "--set", "probes=3"], 2, "unknown setting 'probes'"),
    "no equals sign": (["run", "spectrum", "--set", "probes"], 2, "expected KEY=VALUE"),
    "wrong type": (["run", "spectrum", "--set", "num_probes=many"], 2, "num_probes: expected int"),
    "no probes": (["run", "spectrum", "--set", "num_probes=0"], 2, "num_probes: expected at least 1"),
    "negative tokens": (["run", "spectrum", "--tokens", "-3"], 2, "tokens"),
    "context too long": (["run", "spectrum", "--set", "seq_len=4096"], 2, "seq_len of at most 128"),
    "whole numbers": (["run", "spectrum", "--dtype", "int8"], 2, "expected float32, float64"),
    "unknown device": (["run", "spectrum", "--device", "warp"], 2, "expected a device"),
    "unknown loss": (["run", "spectrum", "--set", "loss=hinge"], 2, "expected a loss"),
    "unknown engine": (["run", "spectrum", "--set", "engine=steam"], 2, "got 'steam'"),
    "config that is no TOML": (["run", "spectrum", "--config", "BROKEN"], 2, "expected settings in TOML"),
    "config that is not there": (["run", "spectrum", "--config", "nowhere.toml"], 2, "could not read"),
    "model that is no TOML": (["info", "BROKEN"], 2, "expected a model configuration in TOML"),
    "model with an unknown key": (["info", "ODD"], 2, "unknown setting 'n_layer'"),
    "empty folder as a model": (["info", "FOLDER"], 2, "expected config.toml and model.safetensors"),
    "weights cut short": (["info", "CUT"], 1, "expected weights in safetensors"),
    "report of nothing": (["report", "FOLDER"], 2, "expected a run folder or a model"),
    "page in no folder": (["report", "FOLDER", "--page", "no/such/page.html"], 2, "existing folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, small, tmp_path, capsys, monkeypatch):
    words, code, sentence = BAD[case]
    places = tmp_path / "places"
    (places / "folder").mkdir(parents=True)
    (places / "broken.toml").write_text("= = =", encoding="utf-8")
    (places / "odd.toml").write_text("n_layer = 3", encoding="utf-8")
    cut = places / "cut"
    cut.mkdir()
    (cut / "config.toml").write_text(SMALL, encoding="utf-8")
    (cut / "model.safetensors").write_bytes(b"\x00\x01")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    files = {
        "SMALL": small,
        "BROKEN": places / "broken.toml",
        "ODD": places / "odd.toml",
        "FOLDER": places / "folder",
        "CUT": cut,
    }
    found, out, err = call(*(files.get(word, word) for word in words), capsys=capsys)
    assert found == code, err
    assert sentence in err
    assert "Traceback" not in err
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Usage:" not in err
    assert not list(here.iterdir()), "something was left behind"


def test_no_words_at_all_are_answered_with_the_help(capsys):
    code, out, err = call(capsys=capsys)
    assert code in (0, 2)  # 0 in older versions of typer
    assert "Usage: curvescope" in out + err
    assert "error: " not in err


def test_debug_shows_the_traceback(capsys):
    from curvescope.cli import main
    from curvescope.core.errors import UsageError

    with pytest.raises(UsageError):
        main(["info", "no-such-model", "--debug"])


def test_an_unforeseen_error_is_one_line_too(monkeypatch, capsys):
    def fail(*, as_json):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(doctor, "show", fail)
    code, _, err = call("doctor", capsys=capsys)
    assert code == 1
    assert err.splitlines() == ["error: RuntimeError: first line", "hint: add --debug for the traceback"]


@pytest.mark.usefixtures("undrawn")
def test_bench_prints_costs_in_gradients(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "small", (1, 8, 2, 16))
    few = ["--batch-size", 1, "--seq-len", 4, "--set", "rounds=1", "--set", "contenders=ggn, ggn checkpoint"]
    several = ["--columns", 1, "--columns", 2]
    code, out, _ = call("bench", "hvp", *few, *several, "--out", tmp_path, "--quiet", capsys=capsys)
    assert code == 0
    assert "gradients" in out
    assert "2 columns" in out
    assert "ggn checkpoint" in out
    assert (tmp_path / "hvp").is_dir()
    code, _, err = call("bench", "flops", capsys=capsys)
    assert code == 2
    assert "got 'flops'" in err
