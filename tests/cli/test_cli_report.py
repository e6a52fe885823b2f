"""`curvescope report` of a model: what it runs, says, reuses and leaves out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from commands import call
from curvescope.cli import main, page_run
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.report.study_selection import MORE, QUICK, SECTIONS, choose, names
from curvescope.runs.folder import RunStopped, SavedProgress
from curvescope.studies import STUDIES, batch_run, find
from curvescope.studies.batch_run import Wanted, run_all

SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Studies that only say that they were asked; errors by name in what is returned."""
    asked, errors = [], {}

    def run(study, settings, *, out, progress, say, tell, force, limit):
        asked.append((study, settings, limit))
        if study in errors:
            raise errors[study]
        progress("the only piece", 1, 1)
        return Path(out) / study, None

    monkeypatch.setattr(batch_run.run_study, "run", run)
    monkeypatch.setattr(
        page_run, "write_page", lambda folders, page: page.write_text("\n".join(map(str, folders)))
    )
    monkeypatch.chdir(tmp_path)
    return asked, errors


def test_every_section_has_studies_whose_quick_settings_are_settings():
    for one in [*(one for found in SECTIONS.values() for one in found), *MORE]:
        assert one.study in STUDIES
        find(one.study).Config.from_dict({**one.settings, **one.always})
        assert one.why
        assert one.seconds > 0
    assert set(QUICK) <= set(SECTIONS)
    curved = [one for name in QUICK if name != "geometry" for one in SECTIONS[name]]
    assert (
        len({one.settings["tokens"] for one in curved}) == 1
    )  # else one page has several λ_max of one model


def test_sections_are_chosen_by_their_names_and_by_those_of_studies():
    assert [one.study for one in choose(["spectra", "heads"], "quick")] == ["spectrum", "heads"]
    (both,) = choose(["block-map", "blocks"], "quick")  # one run
    assert both.always["density"]
    assert both.settings["num_norm_probes"] == 4
    assert {one.study for one in choose([], "quick")} < {one.study for one in choose([], "full")}
    assert {"findings", "spectrum", "gap"} <= set(names())
    with pytest.raises(UsageError, match="expected a section"):
        choose(["spectr"], "quick")


def test_the_plan_is_said_and_the_page_has_all(played, capsys):
    asked, _ = played
    code, out, err = call("report", capsys=capsys)
    assert code == 0, err
    wanted = [one.study for one in choose([], "quick")]
    assert [study for study, *_ in asked] == wanted
    assert f"{len(wanted)} studies of tiny-gpt, about " in err.splitlines()[0]
    assert "  spectrum     how its eigenvalues lie" in err
    assert f"2 of {len(wanted)}: spectrum, how its eigenvalues lie\n  1/1 the only piece\n" in err
    assert out == f"the report is in {Path('report.html').resolve()}\n"
    assert Path("report.html").read_text().splitlines() == [f"runs/{study}" for study in wanted]
    settings = {study: given for study, given, _ in asked}
    assert settings["dynamics"]["checkpoints"] == ("initial", "early", "middle", "final")
    assert {given["model"] for given in settings.values()} == {"tiny-gpt"}
    assert {limit for *_, limit in asked} == {None}


def test_what_is_given_goes_to_every_study_that_takes_it(played, capsys):
    asked, _ = played
    words = ["--tokens", "64", "--seed", "3", "--data", "sample", "--sections", "spectra,embeddings", "-q"]
    code, _, err = call("report", "tiny-gpt", *words, capsys=capsys)
    assert (code, err) == (0, "")
    (_, spectrum, _), (_, embeddings, _) = asked
    assert spectrum["tokens"] == 64
    assert spectrum["num_probes"] == 2  # of the profile
    assert "tokens" not in embeddings
    assert embeddings["seed"] == spectrum["seed"] == 3
    asked.clear()
    call("report", "tiny-gpt", "--profile", "full", "--sections", "spectra", "-q", capsys=capsys)
    assert asked == [("spectrum", {"model": "tiny-gpt"}, None)]
    asked.clear()
    call("report", "tiny-gpt", "--profile", "full", "--sections", "dynamics", "-q", capsys=capsys)
    assert set(asked[0][1]) == {"model", "checkpoints"}


def test_a_study_that_fails_loses_no_other(played, capsys):
    _, errors = played
    errors.update(spectrum=CurvescopeError("the sun is down"), heads=RuntimeError("a\nb"))
    code, out, err = call("report", "--sections", "findings,spectra,heads", "--json", capsys=capsys)
    assert code == 1
    found = json.loads(out)
    assert found["runs"] == ["runs/diagnose"]
    assert found["failed"] == {"spectrum": "the sun is down", "heads": "RuntimeError: a"}
    assert "error: spectrum failed and is not on the page: the sun is down\n" in err
    assert "Traceback" not in err
    errors.update(diagnose=CurvescopeError("neither"))
    code, _, err = call("report", "--sections", "findings,spectra", "-q", capsys=capsys)
    assert code == 1
    assert "error: neither" in err


def test_debug_raises_the_first_error(played):
    _, errors = played
    errors["spectrum"] = CurvescopeError("the sun is down")
    with pytest.raises(CurvescopeError, match="sun"):
        run_all([Wanted("spectrum", "", 1)], {"model": "tiny-gpt"}, out=Path(), strict=True, progress=print)
    with pytest.raises(CurvescopeError, match="sun"):
        main(["report", "--sections", "spectra", "--debug"])


def test_ctrl_c_says_the_command_that_goes_on(played, capsys):
    _, errors = played
    errors["spectrum"] = RunStopped(SavedProgress(2, 12, 0))
    words = ["report", "tiny-gpt", "--sections", "findings,spectra", "--out", "my runs"]
    code, out, err = call(*words, capsys=capsys)
    assert (code, out) == (130, "")
    assert err.splitlines()[-2:] == [
        "stopped; the same command resumes after 2 of 12 pieces",
        f"to resume: {shlex.join(['curvescope', *words])}",
    ]
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["small.toml", "tiny-gpt"], "expected one model, or run folders"),
        (["runs", "--seed", "1"], "expected a model with --seed"),
        (["runs", "--sections", "heads"], "expected a model with --sections"),
        (["tiny-gtp"], "expected a bundled model"),
        (["no/such-model"], "no/such-model"),
        (["small.toml", "--sections", "dynamics"], "nothing is left to show"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, message, small, played, capsys):
    Path("runs").mkdir()
    code, out, err = call("report", *words, capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err


def test_what_a_model_is_not_made_for_is_left_out(small, played, capsys):
    asked, _ = played
    small.write_text('kind = "mlp"\nd_in = 3\nd_hidden = 4\nd_out = 2\ndepth = 2\n', encoding="utf-8")
    code, _, err = call("report", small, "--data", "task:addition", capsys=capsys)
    assert code == 0, err
    assert "left out: heads: " in err
    assert "left out: dynamics: " in err
    assert [study for study, *_ in asked] == ["diagnose", "spectrum", "blocks", "propagation"]
    limit = {study: limit for study, _, limit in asked}["spectrum"]
    assert limit.profile == "quick"
    assert limit.start["tokens"] == 128
    assert "norms" not in {study: limit for study, _, limit in asked}["blocks"].start  # of the bundled model


def test_a_run_folder_that_is_not_there_is_taken_for_no_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs", "spectrum").mkdir(parents=True)
    code, _, err = call("report", "runs/spectrum/2026", capsys=capsys)
    assert code == 2
    assert "expected a run folder or a model, got runs/spectrum/2026" in err
    assert "hint: a run folder has config.toml and result.json" in err


@pytest.mark.usefixtures("undrawn", "few_sequences")
def test_a_page_of_a_model_of_ones_own(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("curvescope.studies.time_budget.Timer._timed", lambda self: 1e-4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SECTIONS, "spectra", (Wanted("spectrum", "why", 1, {
        "batch_size": 64, "num_probes": 1, "num_steps": 4, "num_eigenvalues": 1, "num_trace_probes": 2,
        "num_map_probes": 1, "blocks": ("L0.W_[QV]",)}),))  # fmt: skip
    words = ["report", small, "--data", "task:addition", "--sections", "spectra"]
    code, out, err = call(*words, capsys=capsys)
    assert code == 0, err
    page = Path("report.html").read_text(encoding="utf-8")
    assert "spectrum" in page
    code, out, err = call(*words, "--json", capsys=capsys)
    assert code == 0, err
    (folder,) = json.loads(out)["runs"]
    assert f"already finished: {folder}" in err
    code, _, err = call("report", folder, capsys=capsys)
    assert code == 0, err
