"""`curvescope run`: what it prints, lists, refuses and says when it is stopped."""

import json
import shlex
import signal

import pytest

from commands import call
from curvescope.operators import Hessian
from curvescope.papers import figures_of, find_figure
from curvescope.papers.all_claims import table
from selection import some

pytestmark = pytest.mark.usefixtures("undrawn", "few_sequences")
SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"
QUICK = [
    *("--set", "num_steps=6", "--set", "num_probes=1", "--set", "num_eigenvalues=1"),
    *("--set", "num_trace_probes=2", "--set", "num_map_probes=1", "--set", "batch_size=64"),
    *("--blocks", "L0.W_[QV]"),
]


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return ["run", "spectrum", path, "--data", "task:addition", "--out", tmp_path / "runs", *QUICK]


def interrupted(self, V):
    raise KeyboardInterrupt


def test_a_run_ends_with_its_headline_numbers_and_is_found_again(words, monkeypatch, capsys):
    monkeypatch.setattr("curvescope.studies.time_budget.Timer._timed", lambda self: 0.001)
    code, out, err = call(*words, capsys=capsys)
    assert code == 0, err
    lines = out.strip().splitlines()
    assert lines[0].startswith("λ_max")
    assert any(line.startswith("loss") for line in lines)
    assert "eigenvalue_numerical" not in out  # a column of the tables
    folder = lines[-1]
    code, again, err = call(*words, "--tables", capsys=capsys)
    assert code == 0, err
    assert f"already finished: {folder}" in err
    assert "eigenvalue_numerical" in again
    assert again.endswith(out)
    code, out, err = call(*words, "-q", capsys=capsys)
    assert (out, err) == (f"{folder}\n", "")
    code, out, err = call(*words, "--json", capsys=capsys)
    found = json.loads(out)
    assert found["folder"] == folder
    assert found["summary"][0]["label"] == "λ_max"
    assert found["settings"]["num_steps"] == 6
    assert found["chosen"] == {}
    assert len(found["tables"]["extremes"]) == 5
    monkeypatch.setattr(Hessian, "_matmat", interrupted)
    code, out, err = call(*words, "--force", "-q", capsys=capsys)
    assert code == 130  # computed again


def test_what_was_chosen_to_be_in_time_is_in_the_json(words, monkeypatch, capsys):
    monkeypatch.setattr("curvescope.studies.time_budget.Timer._timed", lambda self: 0.5)
    _, out, _ = call(*words, "--budget", "100s", "--json", "-q", capsys=capsys)
    found = json.loads(out)
    assert found["chosen"]["max_products"] < 400
    assert found["chosen"].items() <= found["settings"].items()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_time_limit_say_where_the_same_command_goes_on(words, number, monkeypatch, capsys):
    own, counted = Hessian._matmat, []

    def product(self, V):
        if len(counted) == 4 + 2:  # two inside the first: the check
            signal.raise_signal(number)
        counted.append(1)
        return own(self, V)

    monkeypatch.setattr("curvescope.studies.time_budget.Timer._timed", lambda self: 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(Hessian, "_matmat", product)
        code, out, err = call(*words, capsys=capsys)
    assert code == 130
    assert out == ""
    *_, where, command = err.splitlines()
    assert where == (
        "stopped; the same command resumes from step 4 of 6 of piece 1 of 16: density of the Hessian"
    )
    assert command == f"to resume: {shlex.join(['curvescope', *map(str, words)])}"
    code, _, err = call(*words, capsys=capsys)
    assert code == 0
    assert "0 of 16 pieces" in err
    assert "H: eigenvalues from " in err  # a first answer while it runs


@pytest.mark.parametrize("study", ["spectrum", "heads"])
def test_settings_are_listed(study, capsys):
    code, out, _ = call("run", study, "--settings", capsys=capsys)
    assert code == 0
    assert "tiny-gpt" in out
    assert "whole number" in out
    assert ("random vectors of each density" in out) == (study == "spectrum")


@pytest.mark.parametrize("paper", ["ormaniec2025", "molina2023", "singh2025"])
def test_settings_of_the_figures_of_a_paper_are_listed_with_their_meaning(paper, capsys):
    code, out, _ = call("reproduce", paper, "--settings", capsys=capsys)
    assert code == 0
    for figure in figures_of(paper, more=True):
        assert f"{figure}: " in out
        assert all(setting.meaning for setting in find_figure(paper, figure).Config.settings())
    code, out, _ = call("reproduce", paper, "--figure", min(figures_of(paper)), "--settings", capsys=capsys)
    assert out.count("meaning\n") == 1


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], {}),
        (["--set", "profile=full", "--set", "device=cuda"], {"profile": "full", "device": "cuda"}),
        (["--set", "profile=full", "--profile", "quick", "--replay"], {"profile": "quick", "replay": True}),
    ],
)
def test_what_is_set_of_a_figure_is_not_lost_to_the_default_of_an_option(
    words, settings, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr(
        "curvescope.cli.reproduce.reproduce", lambda *a, **k: asked.append(k["settings"]) or {}
    )
    monkeypatch.setattr("curvescope.cli.reproduce.read", lambda folder: table({}))
    code, _, err = call("reproduce", "ormaniec2025", "--figure", "growth", *words, capsys=capsys)
    assert code == 0, err
    assert asked == [settings]


HINTS = {
    "blocks of heads": (["run", "heads", "--blocks", "L0.*"], "takes no --blocks", "--set layers=0,1"),
    "data of nothing": (["run", "hvp", "--data", "x"], "hvp takes no --data", "run hvp --settings"),
    "unknown setting": (["run", "spectrum", "--set", "probes=3"], "unknown setting 'probes'", "--settings"),
    "a part of a name": (["run", "spectrum", "--set", "eigenvalues=3"], "unknown", "'num_eigenvalues'"),
    "too many tokens": (["run", "spectrum", "--tokens", "99999999"], "expected a text of", "--tokens "),
    "context": (["run", "spectrum", "--set", "seq_len=4096"], "of at most 128", "--set seq_len=128"),
    "initials": (["run", "spectrum", "--set", "loss=ce"], "expected a loss", "'cross_entropy'"),
    "layers": (["run", "spectrum", "--blocks", "L9.*"], "no block matches", "4 layers, L0 to L3"),
    "far-fetched": (["run", "zzz"], "expected a study", "known: spectrum"),
    "list of words": (["run", "heads", "--set", "layers=a,b"], "layers: expected int, got 'a'", ""),
    "a setting as an option": (["run", "spectrum", "--loss", "mse"], "is a setting", "--set loss=mse"),
    "with hyphens": (["run", "spectrum", "--num-probes=4"], "is a setting", "--set num_probes=4"),
    "before its study": (["run", "--seq-len", "8", "spectrum"], "is a setting", "--set seq_len=8"),
    "a sign": (["run", "trajectory", "--legacy", "-q"], "is a setting", "--set legacy=true"),
    "of a paper": (["reproduce", "molina2023", "--token", "-2"], "is a setting", "--set token=-2"),
    "of a benchmark": (["bench", "hvp", "--rounds", "3"], "is a setting", "--set rounds=3"),
    "of no study": (["run", "spectrum", "--num-heads", "3"], "no such option --num-heads", ""),
    "no such place": (["run", "spectrum", "--out", "/proc/x"], "can be written to", "choose another"),
}


@pytest.mark.parametrize("case", some(sorted(HINTS, key="too many tokens".__eq__), len(HINTS) - 1))
def test_hints_are_in_the_syntax_of_the_command_line(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, message, hint = HINTS[case]
    code, out, err = call(*words, capsys=capsys)
    assert code == 2, err
    assert out == ""
    assert message in err
    assert hint in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_page_that_is_written_over_is_said(words, tmp_path, capsys):
    folder = call(*words, "-q", capsys=capsys)[1].strip()
    page = tmp_path / "page.html"
    for there in (False, True):
        code, _, err = call("report", folder, "--page", page, capsys=capsys)
        assert code == 0, err
        assert (str(page) in err) == there


def test_a_page_leaves_out_what_is_not_finished(words, tmp_path, monkeypatch, capsys):
    runs, page = tmp_path / "runs", tmp_path / "page.html"

    def stop(result, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("curvescope.studies.time_budget.Timer._timed", lambda self: 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("curvescope.runs.folder.write_figures", stop)
        assert call(*words, capsys=capsys)[0] == 130
    (begun,) = runs.glob("spectrum/*")
    finishing = f"curvescope run spectrum --config {begun}/config.toml --out {runs}"
    code, _, err = call("report", runs, "--page", page, capsys=capsys)
    assert (code, page.exists()) == (1, False)
    assert err.splitlines()[-1] == f"hint: {finishing}"
    done = call(*words, "--seed", "1", "-q", capsys=capsys)[1].strip()
    for asked in ([runs], [runs / "spectrum"], [begun, done]):
        code, _, err = call("report", *asked, "--page", page, capsys=capsys)
        assert code == 0, err
        assert f"left out: {begun} is not finished; to finish it: {finishing}\n" in err
        assert page.read_text(encoding="utf-8").count('<dl class="cards">') == 1
    code, out, _ = call(*finishing.split()[1:], "-q", capsys=capsys)
    assert (code, out) == (0, f"{begun}\n")


def test_doctor_and_completion(capsys):
    code, out, _ = call("doctor", "--json", capsys=capsys)
    assert "peft" in {row["what"] for row in json.loads(out)}
    code, out, _ = call("--help", capsys=capsys)
    assert code == 0
    assert "--install-completion" in out


@pytest.mark.parametrize(
    ("study", "word"), [("monitor", "history.csv"), ("spectrum", "curvescope report {run}")]
)
def test_a_run_folder_without_a_history_cannot_be_diagnosed(tmp_path, capsys, study, word):
    run = tmp_path / "hot"
    (run / "state").mkdir(parents=True)
    (run / "config.toml").write_text(f'study = "{study}"\nversion = "0"\n', encoding="utf-8")
    code, out, err = call("diagnose", run, "--out", tmp_path / "runs", capsys=capsys)
    assert (code, out) == (2, "")
    assert f"got {run}" in err
    assert word.format(run=run) in err


def test_a_run_that_does_not_exist_is_named_with_its_neighbors(tmp_path, capsys):
    neighbor = tmp_path / "mine"
    neighbor.mkdir()
    (neighbor / "history.csv").write_text("step\n", encoding="utf-8")
    code, _, err = call("diagnose", tmp_path / "nope", capsys=capsys)
    assert code == 2
    assert "does not exist" in err
    assert str(neighbor) in err


def test_the_device_is_cuda_if_there_is_one_unless_a_person_says_otherwise(monkeypatch):
    from curvescope.cli.arguments.settings_parsing import choose_device

    said = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device({"device": "auto", "seed": 1}, said.append) == {"seed": 1}
    assert not said
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    assert choose_device({}, said.append) == {"device": "cuda"}
    assert len(said) == 1
    assert "a card" in said[0]
    assert choose_device({"device": "cpu"}, said.append) == {"device": "cpu"}
    assert len(said) == 1


def test_doctor_says_that_threads_are_slower_than_one_and_what_to_do():
    from curvescope.cli.doctor import threads_row

    assert threads_row(2, 0.6)[1] == "ok"
    _, state, words = threads_row(2, 50.0)
    assert state != "ok"
    assert "50 times" in words
    assert "OMP_NUM_THREADS=1" in words
