"""Settings that fit into a time: chosen from one timed product, said, and taken again by the same command."""

import pytest

from curvescope.core.errors import UsageError
from curvescope.core.number_format import duration
from curvescope.studies import find, run_study, time_budget
from curvescope.studies.spectrum import Config
from curvescope.studies.time_budget import FIRST, Timer, fit, limit_of, seconds_of
from selection import some

SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"
FEW = {"num_steps": 4, "num_probes": 1, "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1}


@pytest.fixture
def product(monkeypatch, undrawn):
    """A product takes as many seconds as this says."""
    seconds = {"each": 0.01}
    monkeypatch.setattr(Timer, "_timed", lambda self: seconds["each"])
    return seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("3min", 180), ("3 m", 180), ("1.5h", 5400), ("45 sec", 45)],
)
def test_budgets(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "3", "1.5", "3 days", "0s", "-3min"])
def test_what_is_no_budget(text):
    with pytest.raises(UsageError, match="expected a budget such as"):
        seconds_of(text)


def test_limits():
    bundled, other = Config(), Config(model="somewhere/else")
    assert limit_of(bundled, None, None) is None  # its numbers are the same everywhere
    assert limit_of(other, None, None) == 180
    assert limit_of(bundled, "quick", None) == 60
    assert limit_of(other, "full", None) is None
    assert limit_of(bundled, None, "20s") == 20
    with pytest.raises(UsageError, match="got both"):
        limit_of(bundled, "quick", "20s")
    with pytest.raises(UsageError, match="quick or full"):
        limit_of(bundled, "swift", None)


def test_what_is_in_time_stays_and_what_is_not_is_lowered(product):
    study = find("spectrum")
    assert fit(study, {}, 1e4).cfg == Config()
    product["each"] = 0.2
    found = fit(study, {"num_probes": 4, "tokens": 128}, 180.0)
    assert found.cfg.num_probes == 4  # given
    assert found.cfg.tokens == 128
    assert found.cfg.num_steps < 40
    assert found.cfg.max_products < 400
    assert "chosen for 3 min: " in found.words
    assert found.cfg.blocks == Config().blocks
    product["each"] = 1e3
    found = fit(study, {}, 60.0)
    assert "these are the smallest" in found.words
    assert fit(study, {}, None).cfg == Config()


def test_an_estimate_counts_the_products(product):
    product["each"] = 0.4
    words = fit(
        find("spectrum"),
        {"tokens": 64, "blocks": ["L0.W_Q"], "sampling": False, **FEW, "max_products": 8},
        None,
    ).words
    each = 4 + 8 + 2 + 1
    assert f"{3 * each} products of 0.4 s" in words
    assert words.startswith(f"up to about {duration((3 * each + 3 * FIRST) * 0.4)}:")


def test_work_that_no_model_changes_is_counted(product):
    """The small models of `influence`, which are trained again whatever the model is."""
    product["each"] = 0.4
    few = {"tokens": 64, "max_products": 4, "num_removed": 10, "blocks": ["L3.b_O"]}
    with_, without = (fit(find("influence"), {**few, "cases": cases}, None).words for cases in (["MLP"], []))
    assert f", and {duration(4.0 + 10 * 1.6)} independent of the model" in with_
    assert "independent of the model" not in without


@pytest.mark.parametrize("name", some(["blocks", "spectrum"], 1))
def test_every_rung_is_cheaper_and_allowed(name, product):
    study = find(name)
    timer = Timer(study.Config(), study.plan)
    assert all(set(rung) <= set(study.Config().to_dict()) for rung in study.plan.ladder)
    levels = time_budget.levels_of(study.plan, study.Config(), {}, selections=True)
    totals = [timer.estimate(level.cfg).expected for level in levels]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    assert totals[-1] < totals[0] / 20


@pytest.mark.usefixtures("few_sequences")
def test_the_same_command_goes_on_with_what_was_chosen(product, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    settings = {"model": str(tmp_path / "small.toml"), "data": "task:addition", "blocks": ["L0.W_Q"]}
    settings |= {"max_products": 8, "num_map_probes": 1}
    limit, said = run_study.Limit(budget="40s"), []
    product["each"] = 0.1
    first, _ = run_study.run("spectrum", settings, out=tmp_path, limit=limit, say=said.append)
    config, _ = run_study.load(first)
    assert config["num_steps"] < 40
    assert "chosen for 40 s" in said[0]
    assert said[0] in (first / "log.txt").read_text(encoding="utf-8")
    chosen = run_study.chosen(first)
    assert chosen.items() <= config.items()
    assert "num_steps" in chosen
    assert chosen.keys().isdisjoint(settings)
    product["each"] = 1e-9  # now all would be in time
    again, _ = run_study.run("spectrum", settings, out=tmp_path, limit=limit, say=said.append)
    assert again == first
    assert said[-1] == f"already finished: {first}"
    other, _ = run_study.run("spectrum", {**settings, **FEW}, out=tmp_path, limit=limit)
    assert other != first
    plain, _ = run_study.run("spectrum", {**settings, **FEW}, out=tmp_path / "plain")
    assert run_study.chosen(plain) == {}


def test_a_study_with_nothing_to_choose_takes_no_budget(tmp_path):
    with pytest.raises(UsageError, match="no --profile or --budget"):
        run_study.run("heads", {}, out=tmp_path, limit=run_study.Limit(profile="quick"))


def test_what_is_chosen_does_not_depend_on_the_load_of_the_machine(monkeypatch, undrawn):
    """Time passes ten times as fast as the thread computes: others have the machine."""
    clock = {"thread": 0.0}

    def product(self, v):
        clock["thread"] += 0.2
        return v

    monkeypatch.setattr(time_budget.time, "thread_time", lambda: clock["thread"])
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: 10 * clock["thread"])
    monkeypatch.setattr(time_budget.Hessian, "__matmul__", product)
    cfg = Config(model="tiny-gpt", tokens=32, seq_len=32)
    timer = Timer(cfg, find("spectrum").plan)
    assert timer.seconds(cfg) == pytest.approx(0.2)
    assert timer.slowed == pytest.approx(10)
    assert "at the current load of the machine" in fit(find("spectrum"), {"tokens": 32}, 60.0).words


@pytest.mark.usefixtures("few_sequences")
@pytest.mark.parametrize("content", ["num_steps = ", "[1, 2]", "nmu_steps = 3\n", "num_steps = -1\n"])
def test_a_damaged_file_of_settings_is_no_end_of_later_runs(content, product, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    settings = {"model": str(tmp_path / "small.toml"), "data": "task:addition", "blocks": ["L0.W_Q"]}
    settings |= {"max_products": 8, "num_map_probes": 1}
    product["each"] = 0.1
    limit = run_study.Limit(budget="10s")
    first, _ = run_study.run("spectrum", settings, out=tmp_path, limit=limit)
    whole = (first / "config.toml").read_text(encoding="utf-8")
    (first / "config.toml").write_text(content, encoding="utf-8")
    again, _ = run_study.run("spectrum", settings, out=tmp_path, limit=limit)
    assert again != first
    assert (again / "config.toml").read_text(encoding="utf-8") == whole
    (again / "asked.toml").write_text(content, encoding="utf-8")
    assert run_study.chosen(again) == {}
