"""Budgets: what is lowered first, what is left out, and that a run keeps its time on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.runs.resumable_loop import Piece, Planned, use_pace, work_through
from curvescope.runs.study import Plan, Selection, Step
from curvescope.studies import find, run_study
from curvescope.studies.blocks import Config as Blocks
from curvescope.studies.spectrum import Config
from curvescope.studies.spectrum import run as run_spectrum
from curvescope.studies.time_budget import Budget, Timer, fit, levels_of

BUDGET = 100.0
EACH = 0.5  # seconds of a product that were reckoned


class Machine:
    """A clock that goes on with the work, `slow` times as fast as was reckoned."""

    def __init__(self, slow: float):
        self.now, self.slow, self.slowed, self.own = 0.0, slow, 1.0, 0.0

    def clock(self) -> float:
        return self.now

    def seconds(self, cfg) -> float:
        return EACH

    def work(self, products: float) -> None:
        self.now += self.slow * EACH * products


@dataclass(frozen=True)
class Probes(Result):
    """The probes that a piece had."""

    count: int


PIECES = [f"piece.{i}" for i in range(10)]


def steps(cfg, problem):
    return [Step("work", "hessian", 2 * cfg.num_trace_probes, pieces=(name,)) for name in PIECES]


PLAN = Plan(
    steps,
    ({"num_trace_probes": 8}, {"num_trace_probes": 4}, {"num_trace_probes": 2}),
    selections=(Selection({"num_trace_probes": 1}, "one probe"),),
)


def done_in(slow: float, cfg: Config, surprise: float = 1.0) -> tuple[float, list[int]]:
    """Seconds of a run, and the probes of its pieces; the first piece takes `surprise` times as long."""
    machine = Machine(slow)
    budget = Budget(PLAN, cfg, {}, BUDGET, begun=0.0, timer=machine, clock=machine.clock)

    def pieces(cfg):
        def work(name):
            longer = surprise if name == PIECES[0] else 1.0
            machine.work(longer * (2 * cfg.num_trace_probes + 0.4))  # a fifth of a graph
            return Probes(cfg.num_trace_probes)

        return [Piece(name, lambda name=name: work(name)) for name in PIECES]

    with use_pace(budget):
        found = work_through(pieces(cfg), planned=Planned(cfg, None, pieces))
    return machine.now, [found.take(Probes, name).count for name in PIECES]


@pytest.mark.parametrize("slow", [0.5, 1.0, 2.0, 5.0])
def test_a_run_ends_in_its_time_however_fast_the_machine_is(slow):
    taken, probes = done_in(slow, Config(num_trace_probes=8))
    assert taken <= 1.2 * BUDGET
    assert probes == sorted(probes, reverse=True) or slow > 1
    assert (min(probes) < 8) == (slow > 1)


def test_what_was_lowered_for_a_slow_beginning_is_raised_again():
    taken, probes = done_in(0.5, Config(num_trace_probes=8), surprise=12.0)
    assert taken <= BUDGET
    assert min(probes[1:4]) < 8
    assert probes[-1] == 8


def test_without_a_budget_nothing_is_planned_again():
    cfg = Config(num_trace_probes=8)

    def pieces(cfg):
        return [Piece(name, lambda: Probes(cfg.num_trace_probes)) for name in PIECES]

    found = work_through(pieces(cfg), planned=Planned(cfg, None, pieces))
    assert {found.take(Probes, name).count for name in PIECES} == {8}


@pytest.mark.parametrize(
    "name",
    [
        "spectrum",
        "blocks",
        "diagnose",
        "propagation",
        "gap",
        "sinks",
        "compare",
        "landscape",
        "taylor",
        "influence",
    ],
)
def test_tokens_are_lowered_last_and_not_below_what_verdicts_need(name):
    study = find(name)
    cfg, plan = study.Config(), study.plan
    levels = [level.cfg for level in levels_of(plan, cfg, {}, selections=False)]
    tokens = [level.tokens for level in levels]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[: 1 + len(plan.ladder)] == [cfg.tokens] * len(tokens[: 1 + len(plan.ladder)])
    assert tokens[-1] == min(cfg.tokens, plan.sequences * cfg.seq_len)
    assert plan.sequences >= 4
    given = {"tokens": cfg.tokens}
    assert {level.cfg.tokens for level in levels_of(plan, cfg, given, selections=True)} == {cfg.tokens}


@pytest.fixture
def product(monkeypatch, undrawn):
    """A product takes as many seconds as this says."""
    seconds = {"each": 0.01}
    monkeypatch.setattr(Timer, "_timed", lambda self: seconds["each"])
    return seconds


def test_a_budget_that_is_too_short_for_all_says_what_is_done_and_what_all_takes(product):
    product["each"] = 0.2
    found = fit(find("blocks"), {}, 120.0, kept=True)
    assert "2 min" in found.choice
    assert "is too short for all numbers" in found.choice
    assert "largest blocks" in found.choice
    assert isinstance(found.cfg, Blocks)
    assert found.cfg.max_blocks < Blocks().max_blocks
    assert found.cfg.tokens >= 4 * found.cfg.seq_len
    assert found.budget is not None


def test_a_budget_in_which_nothing_can_be_had_is_refused_with_one_that_is_enough(product):
    product["each"] = 30.0
    with pytest.raises(CurvescopeError, match="is too short for this study") as error:
        fit(find("blocks"), {}, 30.0, kept=True)
    assert "--budget" in (error.value.hint or "")
    assert (
        fit(find("blocks"), {}, 30.0).cfg
        == levels_of(find("blocks").plan, Blocks(), {}, selections=False)[-1].cfg
    )


def test_a_busy_machine_does_not_refuse_a_budget_that_an_idle_one_can_meet(product, monkeypatch):
    product["each"] = 0.2

    def busy(self):
        self.slowed = 40.0
        return product["each"]

    monkeypatch.setattr(Timer, "_timed", busy)
    found = fit(find("blocks"), {}, 60.0, kept=True)
    assert found.cfg == levels_of(find("blocks").plan, Blocks(), {}, selections=True)[-1].cfg
    assert "λ_max" in found.choice
    assert "at the current load of the machine" in found.words


def test_a_spectrum_of_some_operators_can_be_shown(undrawn):
    few = {"num_steps": 4, "num_probes": 1, "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1}
    cfg = Config.from_dict(
        {"tokens": 64, "seq_len": 16, "blocks": ["L0.W_Q", "L0.W_K"], "max_products": 8, **few}
    )
    for operators in (("hessian",), ("hessian", "ggn")):
        found = run_spectrum(replace(cfg, operators=operators))
        assert tuple(found.parts) == operators
        assert found.summary()[0][0] == "λ_max"
        assert found.opening()
        assert len(found.tables()["extremes"]) == 3 if "ggn" in operators else 2
        assert set(found.figures()) == {"density", "block_maps", "traces", "norms"}
        assert found.scenes()
    with pytest.raises(UsageError, match="operators"):
        replace(cfg, operators=("ggn",))


@pytest.mark.usefixtures("few_sequences")
def test_a_run_that_was_lowered_is_taken_for_the_same_budget_alone(product, tmp_path, monkeypatch):
    small = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"
    (tmp_path / "small.toml").write_text(small, encoding="utf-8")
    settings = {"model": str(tmp_path / "small.toml"), "data": "task:addition", "blocks": ["L0.W_Q"]}
    settings |= {
        "num_steps": 4,
        "num_probes": 1,
        "num_eigenvalues": 1,
        "num_map_probes": 1,
        "max_products": 8,
    }
    product["each"] = 1e-3
    limit, said = run_study.Limit(budget="60s"), []
    real = Budget.pieces

    def late(self, planned, done, state):
        if done:
            self._end = self._clock() - 1.0
        return real(self, planned, done, state)

    monkeypatch.setattr(Budget, "pieces", late)
    first, result = run_study.run("spectrum", settings, out=tmp_path, limit=limit, say=said.append)
    assert any("settings lowered" in line for line in said)
    config, _ = run_study.load(first)
    assert config["num_trace_probes"] == 32
    assert run_study.chosen(first)["num_trace_probes"] < 32
    assert list(result.parts) == ["hessian"]
    assert len(result.parts["hessian"].traces.samples) < 32
    again, _ = run_study.run("spectrum", settings, out=tmp_path, limit=limit)
    assert again == first
    full, result = run_study.run("spectrum", settings, out=tmp_path)
    assert full != first
    assert len(result.parts["hessian"].traces.samples) == 32


def test_pieces_of_other_settings_are_left_as_they_are():
    machine = Machine(1.0)
    budget = Budget(PLAN, Config(), {}, BUDGET, begun=0.0, timer=machine, clock=machine.clock)
    other = replace(Config(), num_probes=1)
    planned = Planned(other, None, lambda cfg: [Piece("one", lambda: Probes(cfg.num_probes))])
    assert [piece.name for piece in budget.pieces(planned, (), None)] == ["one"]
