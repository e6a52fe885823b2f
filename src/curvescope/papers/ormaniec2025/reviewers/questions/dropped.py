"""Question 2. The term that the O-notation drops: ∂ℓ/∂F, which is 2(F − Y) or p − y, and its own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from curvescope.papers.ormaniec2025.reviewers.answers import (
    FAILS,
    HOLDS,
    OURS,
    PAPER,
    Answer,
    answer,
    holds_where,
)
from curvescope.papers.ormaniec2025.reviewers.measure import Sweep, sweep_of
from curvescope.papers.ormaniec2025.reviewers.setting import (
    SMALL,
    Config,
    addition_batch,
    embedded,
    problem,
    transformer,
)
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, exponents, mean_of
from curvescope.problem import Problem

QUESTION = "How large is the term that the O-notation drops, and when is the stated order trivial?"
SIGMA = np.array([3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0])
FITTED = 0.1  # the scale at which targets are the network's own outputs
LARGE = 1e3
CASES = (
    "cross-entropy",
    "one-hot targets",
    "targets × 1000",
    "targets ∝ σ",
    "no target",
    "fitted at σ = 0.1",
)
LAWS = CASES[:-1]  # where ∂ℓ/∂F has a power law
BLOCK = "L0.W_Q"
BOUND = 2**0.5  # of ‖p − y‖


def at(case: str, sequences: int, seed: int, sigma: float) -> Problem:
    """One layer on the sums, with squared error unless the case is cross-entropy."""
    module = transformer(seed)
    if case == "cross-entropy":
        batch = addition_batch(sequences)
        return problem(module, sigma * embedded(batch, seed), batch.targets)
    batch = addition_batch(sequences, "onehot_next")
    X, Y = embedded(batch, seed), batch.targets
    assert isinstance(Y, Tensor)
    if case == "fitted at σ = 0.1":
        with torch.no_grad():
            Y = module(FITTED * X)
    factor = {"targets × 1000": LARGE, "targets ∝ σ": sigma, "no target": 0.0}.get(case, 1.0)
    return problem(module, sigma * X, factor * Y, batch.weights, "mse_mean")


def pieces(cfg: Config) -> dict[str, Callable[[], Sweep]]:
    """A sweep for every kind of target."""
    return {
        f"dropped.{case}": partial(
            sweep_of, partial(at, case, cfg.sequences), SIGMA, "L0.W_[QV]", seeds=cfg.count
        )
        for case in CASES
    }


def dropped(found: Sweep) -> np.ndarray:
    """Exponent of ‖∂ℓ/∂F‖ for small σ, (seeds,)."""
    return exponents(found.sigma, found.slope, high=SMALL[-1])


def functional(found: Sweep) -> np.ndarray:
    """Exponent of ‖H_f(W_Q)‖ for small σ, (seeds,)."""
    return exponents(found.sigma, found.curve("H_f", BLOCK), high=SMALL[-1])


def answers(found: Mapping[str, Sweep]) -> list[Answer]:
    """Its slope, what it does to H_f, its bound, and a fit."""
    sweeps = {case: found[f"dropped.{case}"] for case in LAWS}
    own = {case: mean_of(dropped(one)) for case, one in sweeps.items()}
    parts = {case: mean_of(functional(one)) for case, one in sweeps.items()}
    rows = [
        _by_case("∂ℓ/∂F does not depend on σ, so that it may be dropped", own, 0, PAPER),
        _by_case("‖H_f(W_Q)‖ ~ σ^5 whatever the targets", parts, 5, PAPER),
    ]
    rest = np.stack([functional(one) - dropped(one) for one in sweeps.values()])
    worst = rest[np.abs(rest - 5).max(1).argmax()]
    claim = "H_f(W_Q) over ∂ℓ/∂F grows as σ^5 in every case"
    rows.append(answer(2, claim, "5", mean_of(worst), holds_where({"all": mean_of(worst)}, 5)))
    return [*rows, _bounded(found["dropped.cross-entropy"]), _fit(found["dropped.fitted at σ = 0.1"])]


def _by_case(claim: str, means: Mapping[str, Mean], power: float, source: str) -> Answer:
    words = "; ".join(f"{case} σ^{mean.value:.2f}" for case, mean in means.items())
    worst = max(means.values(), key=lambda mean: abs(mean.value - power))
    verdict = holds_where(means, power)
    return answer(2, claim, f"σ^{power:g}", worst, verdict, measured=words, source=source)


def _bounded(one: Sweep) -> Answer:
    """‖p − y‖ ≤ √2: over all scales, largest of a seed."""
    largest = mean_of(one.slope.max(1))
    over = f"root mean square from {one.slope.min():.3f} to {one.slope.max():.3f} for σ from 0.0003 to 10"
    verdict = HOLDS if one.slope.max() <= BOUND else FAILS
    return answer(2, "for cross-entropy ∂ℓ/∂F is bounded by √2 at every σ", "√2", largest, verdict,
                  measured=over, source=OURS)  # fmt: skip


def _fit(one: Sweep) -> Answer:
    """‖H_f‖/‖H_o‖ of W_Q where F = Y, against the scales next to it."""
    share = one.curve("H_f", BLOCK) / one.curve("H_o", BLOCK)
    place = int(np.abs(one.sigma - FITTED).argmin())
    here, beside = mean_of(share[:, place]), share[:, [place - 1, place + 1]].min()
    verdict = HOLDS if share[:, place].max() < 1e-10 < beside else FAILS
    words = (
        f"‖H_f‖/‖H_o‖ of W_Q at most {share[:, place].max():.1e} at the fit, at least {beside:.1e} beside it"
    )
    claim = "where the network fits (F = Y) the order is trivial: H_f is zero"
    return answer(2, claim, "0", here, verdict, measured=words, source=OURS)
