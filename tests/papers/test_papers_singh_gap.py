"""singh2025, gap and norms: verdicts are computed from numbers, and both families have one size and task."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from curvescope.algorithms.blocks.probes import Ends, OwnProbes
from curvescope.algorithms.spectra.wasserstein import SpectralDistance
from curvescope.papers import find_figure
from curvescope.papers.singh2025 import norms
from curvescope.papers.singh2025.gap import (
    FAMILIES,
    TASKS,
    Config,
    FamilyGaps,
    ModelCase,
    TrainedModel,
    data_of,
    measure_course,
    module_of,
)
from curvescope.studies.gap import Draws, Gap, Pair

SEEDS, STEPS = 3, [0, 10]


def probes(norm: float, top: float = 1.0) -> OwnProbes:
    ends = Ends(np.array([-1.0, top]), np.zeros(2), -1.0, top)
    samples = np.full(2, norm**2)
    return OwnProbes(
        1.0, 0.0, norm, 0.01, np.ones(2), samples, 2, 0, 1.0, 1.0, 0.99 * norm, 1.01 * norm, ends, exact=True
    )


def pair(*, gap: float, share: float, block: str = "all", loss: float = 1.0, distance: float = 0.1) -> Pair:
    """A block with these numbers; the distance in units of the root mean square eigenvalue."""
    unit = 1 / math.sqrt(4)
    w = distance * unit
    found = SpectralDistance(w, 0.0, 0.0, w, w, w, w, 0.0, 0)
    return Pair(block, 4, loss, probes(1.0), probes(1.0, 1 - gap), probes(share), found, {})


def result(
    *, transformer: float, last: float, late: float = 0.2, sign: float = 1.0, distance: float = 0.1
) -> FamilyGaps:
    courses = {}
    for family in FAMILIES:
        size = transformer if family == "transformer" else 0.1
        for task in TASKS:
            for seed in range(SEEDS):
                pairs = {
                    str(step): pair(
                        gap=size * (1 + 0.1 * seed), share=last if step else 0.5, distance=distance * last
                    )
                    for step in STEPS
                }
                courses[ModelCase(family, task, seed).name] = TrainedModel(10, pairs)
    blocks = ["all", "L*.W_Q", "L*.W_K", "L*.W_V"]
    shares = {"all": late, "L*.W_Q": 0.9, "L*.W_K": 0.8, "L*.W_V": 0.1}
    pairs = {f"initial.{b}": pair(gap=0.1, share=0.9, block=b) for b in blocks}
    pairs |= {f"final.{b}": pair(gap=0.1 * sign, share=shares[b], block=b) for b in blocks}
    targets = {
        kind: pair(gap=0.1, share=s)
        for kind, s in zip(("predicted", "drawn", "random"), (0.1, 0.2, 0.6), strict=True)
    }
    draws = Draws(np.eye(6)[None] + 0.01)
    bundled = Gap("m", "d", "l", 8.0, ["initial", "final"], blocks, pairs, targets, draws)
    return FamilyGaps(SEEDS, STEPS, courses, bundled)


def verdicts(found: FamilyGaps) -> list[str]:
    return [claim.verdict for claim in found.claims()]


def test_verdicts_follow_the_numbers():
    one = verdicts(result(transformer=0.3, last=0.01))
    other = verdicts(result(transformer=0.02, last=0.4, late=0.95, sign=-1.0, distance=2.0))
    assert len(one) == 12
    worse, vanishes, bound, drawn, large, late, small, keys = (0, 4, 6, 7, 8, 9, 10, 11)
    for place in (worse, worse + 1, worse + 2, worse + 3, vanishes, vanishes + 1, bound, late, small):
        assert (one[place], other[place]) == ("holds", "fails"), place
    assert one[large] == one[keys] == "holds"
    assert one[drawn] in ("holds", "fails")
    near = verdicts(result(transformer=0.1, last=0.01))
    assert near[worse] == "not decided"


def test_draws_with_an_expectation_are_told():
    found = result(transformer=0.3, last=0.01)
    none = replace(found, bundled=replace(found.bundled, draws=Draws(np.eye(6)[None])))
    assert verdicts(none)[7] == "holds"
    source = np.random.default_rng(0).normal(size=(6, 50)) + 1.0
    some = replace(found, bundled=replace(found.bundled, draws=Draws((source @ source.T)[None])))
    assert verdicts(some)[7] == "fails"


def test_both_families_have_one_size_and_task():
    sizes = [sum(p.numel() for p in module_of(ModelCase(f, "mse", 0)).parameters()) for f in FAMILIES]
    assert abs(sizes[0] - sizes[1]) <= 0.02 * sizes[0]
    one, other = (data_of(ModelCase(family, "cross_entropy", 1)) for family in FAMILIES)
    assert (one[0].inputs == other[0].inputs).all()
    assert (one[0].targets == other[0].targets).all()


def test_a_course_is_exact_and_learns():
    course = measure_course(ModelCase("mlp", "mse", 0), (0, 30))
    first, last = course.pair(0), course.pair(30)
    assert last.loss < 0.9 * first.loss
    assert first.hessian.exact
    assert 0 < first.wasserstein().value <= first.share().value


@pytest.mark.usefixtures("unrendered")
def test_words_tables_and_figures_are_complete():
    found = result(transformer=0.3, last=0.01)
    tables = found.tables()
    assert set(found.captions()) >= {*tables, *found.figures()}
    assert len(tables["families"]) == 2 * 2 * SEEDS * len(STEPS)
    assert len(found.summary()) > 4
    assert find_figure("singh2025", "gap").Config is Config
    assert find_figure("singh2025", "norms").Config is norms.Config
    assert norms.Config(profile="full").of_study().num_models == 300
    assert norms.Config(tokens=64).of_study().tokens == Config(tokens=64).of_study().tokens == 64
    assert Config().of_study().tokens == 128
