"""The command: files, exit codes, resuming, drawing again; on a figure small enough to run often."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import pytest

from curvescope.cli import main
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.papers import PAPERS, all_claims, find_figure
from curvescope.papers.common import Claim, FigureConfig, as_printed, like, within
from curvescope.papers.reproduce import redraw, reproduce
from curvescope.report import write_page
from curvescope.runs.resumable_loop import Piece, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import Shown


@dataclass(frozen=True)
class Config(FigureConfig):
    experiments: tuple[str, ...] = ("*",)
    curves: int = 2


@dataclass(frozen=True)
class Curve(Result):
    x: np.ndarray


@dataclass(frozen=True)
class Small(Shown):
    pieces: list

    def claims(self):
        return [Claim("a number", "1", "1", "agrees")]

    def summary(self):
        return [("a number", "1", "one")]

    def captions(self):
        return {f"small_{i}": f"curve {i}" for i in range(len(self.pieces))}

    def tables(self):
        import pandas as pd

        return {"small": pd.DataFrame({"x": np.concatenate([p.x for p in self.pieces])})}

    def figures(self):
        import matplotlib.pyplot as plt

        found = {}
        for i, piece in enumerate(self.pieces):
            found[f"small_{i}"], ax = plt.subplots()
            ax.plot(piece.x, label="σ$^{2}$")
        return found


class Counter:
    done = 0
    stop_at = None
    contents = ""


def run(cfg, *, progress=None, state=None):
    def curve(i):
        if Counter.stop_at == i:
            raise KeyboardInterrupt
        Counter.done += 1
        return Curve(np.arange(3.0) + i)

    pieces = [Piece(f"piece{i}", partial(curve, i), f"curve {i}") for i in range(cfg.curves)]
    found = work_through(pieces, contents=Counter.contents, progress=progress, state=state)
    return Small([found.take(Curve, f"piece{i}") for i in range(cfg.curves)])


@pytest.fixture(autouse=True)
def small_figure(monkeypatch):
    """A figure `small` of the paper, in place of the real ones."""
    module = ModuleType("curvescope.papers.ormaniec2025.small")
    module.STUDY = Study(Config, run)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        "curvescope.papers.ormaniec2025.FIGURES", {"small": "two curves", "histograms": "bars"}
    )
    Counter.done, Counter.stop_at, Counter.contents = 0, None, ""


def call(*words, capsys):
    code = 0
    try:
        main(["reproduce", *(str(word) for word in words)])
    except SystemExit as stop:
        code = stop.code or 0
    found = capsys.readouterr()
    return code, found.out, found.err


ALL = ["all_claims.csv", "all_claims.md"]
FILES = ["small.csv", "small.html", "small.json", "small.npz", "small_0.pdf", "small_0.png"]


def test_a_figure_lies_flat_in_its_folder(tmp_path, capsys):
    pytest.importorskip("plotly")
    code, out, err = call(
        "ormaniec2025", "--figure", "small", "--set", "curves=1", "--out", tmp_path, capsys=capsys
    )
    assert code == 0, err
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*FILES, "settings.json", *ALL])
    assert "claim" in out.splitlines()[1]
    assert "agrees" in out
    assert "1 claim: 1 agrees; all of them in all_claims.md and .csv" in out
    assert out.strip().splitlines()[-1] == str(tmp_path)
    assert "1/1 small: curve 0" in err
    meta = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert meta["paper"] == "ormaniec2025"
    assert "ICLR 2025" in meta["citation"]
    entry = meta["figures"]["small"]
    assert entry["settings"] == {
        "profile": "quick", "replay": False, "device": "cpu", "experiments": ["*"], "curves": 1
    }  # fmt: skip
    assert entry["files"] == sorted(FILES)
    html = (tmp_path / "small.html").read_text(encoding="utf-8")
    assert "Plotly.newPlot" in html
    assert "σ<sup>2<\\/sup>" in html
    assert "https://cdn" not in html.split("</script>", 1)[1]


@pytest.mark.usefixtures("unrendered")
def test_files_that_a_figure_no_longer_has_are_removed(tmp_path):
    reproduce("ormaniec2025", ["small"], settings={"curves": 3}, out=tmp_path)
    assert (tmp_path / "small_2.pdf").exists()
    reproduce("ormaniec2025", ["small"], settings={"curves": 1}, out=tmp_path)
    assert not (tmp_path / "small_2.pdf").exists()


@pytest.mark.usefixtures("unrendered")
def test_a_killed_run_goes_on(tmp_path, capsys):
    words = ["ormaniec2025", "--figure", "small", "--out", tmp_path, "--quiet"]
    Counter.stop_at = 1
    code, out, err = call(*words, capsys=capsys)
    assert code == 130
    assert out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(CurvescopeError, match="nothing in it is finished"):
        redraw("ormaniec2025", out=tmp_path)
    Counter.stop_at = None
    code, _, err = call(*words[:-1], capsys=capsys)
    assert code == 0
    assert "small: resuming, 1 of 2 pieces were there" in err
    assert Counter.done == 2
    assert not (tmp_path / "state").exists()


@pytest.mark.usefixtures("unrendered")
def test_a_finished_figure_is_read_and_not_computed_again(tmp_path, capsys):
    words = ["ormaniec2025", "--figure", "small", "--out", tmp_path]
    code, out, _ = call(*words, capsys=capsys)
    assert (code, Counter.done) == (0, 2)
    code, again, err = call(*words, capsys=capsys)
    assert (code, Counter.done, again) == (0, 2, out)
    assert "small: already finished" in err
    assert not (tmp_path / "state").exists()
    assert call(*words, "--force", capsys=capsys)[0] == 0
    assert Counter.done == 4
    Counter.contents = "other data"
    assert call(*words, capsys=capsys)[0] == 0
    assert Counter.done == 6
    (tmp_path / "small.csv").unlink()
    assert call(*words, capsys=capsys)[0] == 0
    assert Counter.done == 8


@pytest.mark.usefixtures("unrendered")
def test_other_settings_do_not_resume_it(tmp_path):
    Counter.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        reproduce("ormaniec2025", ["small"], out=tmp_path)
    Counter.stop_at = None
    reproduce("ormaniec2025", ["small"], settings={"profile": "full"}, out=tmp_path)
    assert Counter.done == 3
    assert len(list((tmp_path / "state").iterdir())) == 1  # the other is still there to go on


@pytest.mark.usefixtures("unrendered")
def test_drawing_again_computes_nothing(tmp_path, capsys):
    pytest.importorskip("plotly")
    words = ["ormaniec2025", "--figure", "small", "--out", tmp_path, "--quiet"]
    assert call(*words, capsys=capsys)[0] == 0
    before = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    for name in ("small_0.pdf", "small.csv", "small.html"):
        (tmp_path / name).unlink()
    Counter.done = 0
    code, out, _ = call(*words[:3], "--draw", "--out", tmp_path, capsys=capsys)
    assert code == 0
    assert "agrees" in out
    assert Counter.done == 0
    assert (tmp_path / "small_0.pdf").exists()
    assert (tmp_path / "small.csv").exists()
    assert json.loads((tmp_path / "settings.json").read_text(encoding="utf-8")) == before
    assert not (tmp_path / "state").exists()


@pytest.mark.usefixtures("unrendered")
def test_without_plotly_there_is_a_note_and_everything_else(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    said = []
    reproduce("ormaniec2025", ["small"], out=tmp_path, say=said.append)
    assert said[0].startswith("small: no interactive page")
    assert not (tmp_path / "small.html").exists()
    assert (tmp_path / "small.json").exists()


BAD = {
    "unknown paper": (["ormanic2025"], 2, "expected a paper, got 'ormanic2025'"),
    "unknown figure": (["ormaniec2025", "--figure", "smal"], 2, "did you mean 'small'"),
    "bad profile": (
        ["ormaniec2025", "--figure", "small", "--profile", "slow"],
        2,
        "expected one of quick, full",
    ),
    "setting of no figure": (["ormaniec2025", "--figure", "small", "--set", "curve=1"], 2, "setting 'curve'"),
    "no experiments": (["ormaniec2025", "--figure", "histograms", "--experiment", "a*"], 2, "experiments"),
    "nothing to draw": (["ormaniec2025", "--draw"], 1, "expected a reproduction with settings.json"),
    "model of its own": (
        ["ormaniec2025", "tiny-gpt"],
        2,
        "got 'tiny-gpt' for small, histograms of ormaniec2025, which have their own",
    ),
    "model and unknown paper": (["ormanic2025", "tiny-gpt"], 2, "expected a paper, got 'ormanic2025'"),
    "model and unknown figure": (["ormaniec2025", "tiny-gpt", "--figure", "smal"], 2, "did you mean 'small'"),
    "model and drawing": (["ormaniec2025", "tiny-gpt", "--draw"], 2, "--draw computes nothing"),
    "file for a folder": (["ormaniec2025", "--figure", "small", "--out", "file"], 2, "expected a folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, tmp_path, monkeypatch, capsys):
    words, code, sentence = BAD[case]
    monkeypatch.chdir(tmp_path)
    if "file" in words:
        (tmp_path / "file").write_text("", encoding="utf-8")
    found, out, err = call(*words, capsys=capsys)
    assert found == code, err
    assert sentence in err
    assert out == ""
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert Counter.done == 0
    assert [p.name for p in tmp_path.iterdir()] in ([], ["file"]), "something was left behind"


def test_a_folder_of_another_paper_is_refused_before_the_work(tmp_path):
    settings = {"paper": "singh2025", "citation": "", "figures": {}}
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(UsageError, match=r"\bsingh2025\b"):
        reproduce("ormaniec2025", ["small"], out=tmp_path)
    assert Counter.done == 0


@pytest.mark.parametrize("name", ["small.json", "small.npz"])
@pytest.mark.usefixtures("unrendered")
def test_a_damaged_figure_is_computed_again(name, tmp_path):
    reproduce("ormaniec2025", ["small"], out=tmp_path)
    whole, done = (tmp_path / name).read_bytes(), Counter.done
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    reproduce("ormaniec2025", ["small"], out=tmp_path)
    assert Counter.done > done
    done = Counter.done
    reproduce("ormaniec2025", ["small"], out=tmp_path)
    assert Counter.done == done


@pytest.mark.usefixtures("unrendered")
def test_a_model_is_told_to_the_figures(tmp_path, monkeypatch, capsys):
    @dataclass(frozen=True)
    class WithModel(Config):
        model: str = "auto"

    told = []
    module = sys.modules["curvescope.papers.ormaniec2025.small"]
    own = Study(WithModel, lambda cfg, **rest: told.append(cfg.model) or run(cfg, **rest))
    monkeypatch.setattr(module, "STUDY", own)
    for words in (["some/model"], []):
        code, _, err = call("ormaniec2025", *words, "--figure", "small", "--out", tmp_path, capsys=capsys)
        assert code == 0, err
    assert told == ["some/model", "auto"]
    settings = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert settings["figures"]["small"]["settings"]["model"] == "auto"


@pytest.mark.usefixtures("unrendered")
def test_what_is_not_stored_is_not_drawn(tmp_path):
    reproduce("ormaniec2025", ["small"], out=tmp_path)
    with pytest.raises(CurvescopeError, match="expected stored results of histograms"):
        redraw("ormaniec2025", ["histograms"], out=tmp_path)
    (tmp_path / "small.npz").unlink()
    with pytest.raises(CurvescopeError, match=r"small\.npz is missing"):
        redraw("ormaniec2025", out=tmp_path)


def test_a_folder_that_another_process_works_on_is_refused(tmp_path):
    import os

    Counter.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        reproduce("ormaniec2025", ["small"], out=tmp_path)
    (place,) = (tmp_path / "state").iterdir()
    (place / "pid").write_text(str(os.getppid()), encoding="utf-8")
    with pytest.raises(CurvescopeError, match=r"another process .*\bsmall\b"):
        reproduce("ormaniec2025", ["small"], out=tmp_path)


@pytest.mark.usefixtures("unrendered")
def test_what_was_begun_with_other_data_is_not_gone_on_with(tmp_path):
    Counter.stop_at, Counter.contents = 1, "one model"
    with pytest.raises(KeyboardInterrupt):
        reproduce("ormaniec2025", ["small"], out=tmp_path)
    Counter.stop_at, Counter.contents, said = None, "another", []
    reproduce("ormaniec2025", ["small"], out=tmp_path, say=said.append)
    assert Counter.done == 3  # one, and then both again
    assert said[0].startswith("small: ")
    entry = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))["figures"]["small"]
    assert entry["contents"] == "another"


@pytest.mark.usefixtures("unrendered")
def test_a_file_of_another_figure_is_not_overwritten(tmp_path):
    reproduce("ormaniec2025", ["small"], out=tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    settings["figures"] = {"histograms": {"files": ["small.csv"]}}
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(CurvescopeError, match=r"two outputs .*'small\.csv'"):
        reproduce("ormaniec2025", ["small"], out=tmp_path)


@pytest.mark.usefixtures("unrendered")
def test_the_report_shows_a_reproduction(tmp_path):
    reproduce("ormaniec2025", ["small"], out=tmp_path / "out")
    page = write_page([tmp_path / "out"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "small of ormaniec2025" in page
    assert page.count("<img ") == 2
    assert "curve 1" in page
    assert "Published and measured" in page
    assert "ICLR 2025" in page


@pytest.mark.usefixtures("unrendered")
def test_the_folder_has_the_claims_of_all_its_figures(tmp_path):
    """Of a figure that was just made and of one that was made before; what cannot be read is told."""
    reproduce("ormaniec2025", ["small"], out=tmp_path)
    text = (tmp_path / "all_claims.md").read_text(encoding="utf-8")
    assert "1 claim: 1 agrees." in text
    assert "| small | a number | paper | 1 | 1 | agrees | paper |" in text
    all_claims.write(tmp_path, {}, say=print)
    assert (tmp_path / "all_claims.md").read_text(encoding="utf-8") == text
    page = write_page([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "all claims of ormaniec2025" in page
    assert "1 claim: 1 agrees" in page
    (tmp_path / "small.npz").unlink()
    said = []
    all_claims.write(tmp_path, {}, say=said.append)
    assert said[0].startswith("small: ")
    assert "all_claims" in said[0]
    assert len(all_claims.read(tmp_path)) == 0


def test_names_of_papers_and_figures():
    assert set(PAPERS) >= {"ormaniec2025"}
    with pytest.raises(UsageError, match="expected a figure"):
        find_figure("ormaniec2025", "heat")


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [(2.64713e-4, "2.647e-4", "2.647e-04"), (3.54409, "3.5441", "3.5441"), (-0.92096, "-0.9210", "-0.9210")],
)
def test_numbers_as_printed(value, text, found):
    assert like(value, text) == found
    assert as_printed("x", text, value, source="paper").verdict == "agrees"
    assert as_printed("x", text, value * 1.01, source="paper").verdict == "differs"
    assert within("x", float(text), value, relative=1e-9, source="paper").verdict == "differs"
