"""singh2025, sinks: verdicts are computed from numbers, and conditions are what their names say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from curvescope.core.errors import UsageError
from curvescope.papers import figures_of, find_figure
from curvescope.papers.singh2025.sinks import CASES, INITIAL, TRAINED, Config, SinkCases
from curvescope.studies.sinks import RitzLines, SinkBlocks, SinkHeads, Sinks, SinkSpectra, measure
from curvescope.studies.sinks.analysis import HOWS, UNCHANGED

STRENGTHS = {"bias": 8.0, "gated": 0.9}


def lines(top: float, bulk: float) -> RitzLines:
    """Three texts, two probes; one outlier and a bulk, with the factors given."""
    alpha = np.array([bulk, 10.0 * top, -bulk, 0.0]) * np.ones((3, 2, 1))
    alpha *= 1 + 0.001 * np.arange(2)[None, :, None]
    beta = np.full((3, 2, 4), 0.01)
    beta[..., -1] = 0
    return RitzLines(alpha, beta, np.full((3, 2), 4), 100, 1e-16)


def case(mass: float, *, top: float, bulk: float, ggn: float) -> Sinks:
    """Every way moves the ends by `top`, the bulk by `bulk`, the GGN by `ggn`; sinks grow by 0.3."""
    ways = {how: STRENGTHS.get(how, 4.0) for how in HOWS}
    moved = {UNCHANGED: SinkSpectra(np.full(3, 0.1), np.ones(3), lines(1, 1), lines(1, 1))}
    moved |= {
        f"{how}.{s:g}": SinkSpectra(np.full(3, 0.4), np.ones(3), lines(top, bulk), lines(ggn, 1))
        for how, s in ways.items()
    }
    names, own = ["queries, keys"], np.array([1.0])
    blocks = {name: SinkBlocks(names, own * (1 if name == UNCHANGED else bulk), 0.01 * own) for name in moved}
    map_ = np.full((2, 2), mass)
    heads = SinkHeads(map_, 0 * map_, map_, ["in"], np.ones(1), np.ones(1), [])
    hows, strengths = list(ways), list(ways.values())
    return Sinks("m", "d", "l", [8.0] * 3, 100, 0.2, heads, hows, strengths, moved, blocks)


def result(*, top: float, bulk: float, ggn: float, trained: float = 0.5) -> SinkCases:
    found = {name: case(0.1, top=top, bulk=bulk, ggn=ggn) for name in CASES}
    return SinkCases(found | {TRAINED: case(trained, top=top, bulk=bulk, ggn=ggn)})


def verdicts(one: SinkCases) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in one.claims()}


def test_verdicts_follow_the_numbers():
    one = verdicts(result(top=1.5, bulk=0.7, ggn=1.4))
    other = verdicts(result(top=0.6, bulk=1.3, ggn=1.4, trained=0.11))
    still = verdicts(result(top=1.0, bulk=1.0, ggn=1.0))
    assert len(one) == 4 * len(CASES) + 6
    expected = {
        f"outlier activations change the spectrum ({INITIAL})": ("holds", "holds", "fails"),
        f"a larger bias at the first token shrinks the bulk ({TRAINED})": ("holds", "fails", "not decided"),
        f"a larger bias at the first token grows the outliers ({TRAINED})": ("holds", "fails", "not decided"),
        f"larger sinks stretch the spectrum ({INITIAL})": ("holds", "fails", "not decided"),
        "training makes the bundled model's sink": ("holds", "fails", "holds"),
        "all interventions change λ_max in the same direction": ("holds", "holds", "not decided"),
        "the GGN's λ_max changes in the same direction as the Hessian's": ("holds", "fails", "not decided"),
        "a saturated sink reduces the curvature of queries and keys": ("holds", "fails", "not decided"),
        "paired probes distinguish the bulk's change under a bias from noise": ("holds", "holds", "fails"),
        "attention weight without a target token also shrinks the bulk (softmax one, gates)": (
            "holds",
            "fails",
            "not decided",
        ),
    }
    for claim, three in expected.items():
        assert (one[claim], other[claim], still[claim]) == three, claim


def test_conditions_are_what_their_names_say():
    small = CASES["small, no norms, initial"]
    cfg = small.config(full=False, device="cpu")
    problem = small.problem(cfg)
    assert not any("ln" in name for name in problem.model.blocks)
    assert cfg.hows == ("bias", "inserted", "activation")
    assert CASES[TRAINED].config(full=False, device="cpu").hows == tuple(HOWS)
    assert CASES[INITIAL].config(full=True, device="cpu").revision == "initial"
    quick = {"num_probes": 2, "num_steps": 4, "texts": 2, "hows": ("bias",), "biases": (8.0,)}
    found = measure(problem, type(cfg)(**quick, block_steps=0), [])
    assert found.moved["bias.8"].mass.mean() > 0.99 > found.moved[UNCHANGED].mass.mean()


@pytest.mark.usefixtures("unrendered")
def test_words_tables_and_figures_are_complete():
    one = result(top=1.5, bulk=0.7, ggn=1.4)
    assert set(one.captions()) == {*one.tables(), *one.figures()}
    assert set(one.tables()["sinks"]["case"]) == set(CASES)
    assert len(one.summary()) == len(CASES)
    assert "sinks" in figures_of("singh2025")
    assert find_figure("singh2025", "sinks").Config is Config


def test_what_is_set_is_set_of_every_model_and_the_rest_is_the_profile_s():
    for case in CASES.values():
        own, given = Config().of_study(case), Config(texts=2, num_probes=3, threshold=0.1).of_study(case)
        assert own == case.config(full=False, device="cpu")
        assert given == replace(own, texts=2, num_probes=3, threshold=0.1)
    with pytest.raises(UsageError, match="num_probes"):
        Config(num_probes=1)
