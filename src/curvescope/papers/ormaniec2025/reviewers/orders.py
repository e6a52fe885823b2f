"""Questions 1 to 4 and 6: the powers of σ with which blocks grow, by network and range of σ.

1. Do the growth orders of one layer survive depth, skips, heads, W_O and low-rank values?
2. The term that the O-notation drops: ∂ℓ/∂F, which is 2(F − Y) or p − y, and its own order.
3. Is it specific to Transformers? The same sweeps for other networks of equal size on the same task.
4. σ over six decades: the regimes and their exponents.
6. The gradient: its orders and heterogeneity compared with the Hessian's, from the sweeps of question 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.papers.ormaniec2025.reviewers.answers import (
    FAILS,
    HOLDS,
    OURS,
    PAPER,
    Answer,
    Question,
    Regime,
    answer,
    exponents,
    holds_where,
    is_order,
    regimes,
    same_orders,
)
from curvescope.papers.ormaniec2025.reviewers.networks import (
    ARCHITECTURES,
    PARTS,
    SMALL,
    WIDTH,
    Config,
    NormSweep,
    addition_batch,
    embedded,
    problem,
    sweep,
    sweep_of,
    transformer,
)
from curvescope.problem import Problem
from curvescope.runs.study_result import OPEN
from curvescope.studies.common.statistics import Interval, above, below, geometric_interval, mean_interval

Found = Mapping[str, Any]
"""Sweeps by the names of their pieces, among others."""
DEPTH_SCALES = {"2 layers, no skips, all see all": (0.01, 0.02, 0.04)}
"""Scales of a case in which tokens become equal: they differ by σ³, which must stay above rounding."""

ORDERS = {("H_o", "W_Q"): 6, ("H_o", "W_K"): 6, ("H_o", "W_V"): 2, ("H", "W_Q"): 5, ("H", "W_K"): 5,
          ("H", "W_V"): 2}  # fmt: skip
"""The paper's exponents of σ for one layer under cross-entropy; those of W_K follow by symmetry."""

DEPTH_CASES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "2 layers": {"n_layers": 2},
    "4 layers": {"n_layers": 4},
    "2 layers, no skips, causal": {"n_layers": 2, "residual": False},
    "2 layers, no skips, all see all": {"n_layers": 2, "residual": False, "causal": False},
    "2 heads": {"n_heads": 2},
    "4 heads": {"n_heads": 4},
    "W_O = identity": {},
    "values of rank 1": {"d_head": 1},
    "values of rank 2": {"d_head": 2},
}
DEPTH_CLAIMS = {
    "the orders of one layer survive depth": ("one layer", "2 layers", "4 layers"),
    "they survive without skips, causal": ("2 layers, no skips, causal",),
    "they survive without skips and without a causal mask": ("2 layers, no skips, all see all",),
    "they survive several heads": ("2 heads", "4 heads"),
    "they do not depend on W_O": ("W_O = identity",),
    "they survive value maps of low rank": ("values of rank 1", "values of rank 2"),
}
DROPPED_SIGMA = np.array([3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0])
FITTED = 0.1  # scale at which the targets equal the network's own outputs
LARGE = 1e3
TARGETS = (
    "cross-entropy",
    "one-hot targets",
    "targets × 1000",
    "targets ∝ σ",
    "no target",
    "fitted at σ = 0.1",
)
POWER_LAWS = TARGETS[:-1]  # cases in which ∂ℓ/∂F has a power law
BLOCK = "L0.W_Q"
BOUND = 2**0.5  # upper bound of ‖p − y‖
ARCHITECTURE_SIGMA = np.array([*SMALL, 1.0])
FIRST = "Transformer"
APART = 0.5  # exponents of different order differ by more than this
SETTING_BLOCKS = {"MLP": ("W_1", "U")}
EPS = 1e-12  # ε of the LayerNorms; 1e-5 would add a regime below σ ≈ √ε, in which they do not rescale
SETTINGS = {
    "softmax": "softmax: one layer, one head, width 4, ReLU feed-forward of width 5, skips, no norm, "
    "cross-entropy",
    "softmax, Pre-LN": f"Pre-LN: the same with LayerNorms in front, ε = {EPS:g}",
    "linear attention": "linear attention: one layer without softmax, skips and feed-forward, squared error "
    "of one-hot digits",
    "MLP": "MLP: three layers of width 4 on the last six tokens, cross-entropy",
}
"""Architecture and loss of each network, in words."""
LAWS: tuple[tuple[str, str, str, float, str], ...] = (
    ("softmax", "H", "L0.W_Q", 5, PAPER),
    ("softmax", "H_o", "L0.W_Q", 6, PAPER),
    ("softmax", "H", "L0.W_V", 2, PAPER),
    ("softmax, Pre-LN", "H", "L0.W_Q", 0, PAPER),
    ("softmax, Pre-LN", "H", "L0.W_V", 0, PAPER),
    ("linear attention", "H", "L0.W_Q", 6, PAPER),
    ("MLP", "H", "W_1", 2, PAPER),
)
"""The paper's exponents by network, part and block; with Pre-LN nothing grows."""
FAR = 20.0
# Exponents of H with Pre-LN for σ ≥ FAR, where the residual stream dominates attention's output.
TAILS = {"L0.W_Q": -1, "L0.W_V": -2}
HIGH = 1e-2  # largest scale in the fit of exponents
AT = 0.1  # scale at which blocks are compared
ROLES = ("W_Q", "W_K", "W_V", "W_O")
GRADIENT = {"softmax": {"W_Q": 3, "W_K": 3, "W_V": 1, "W_O": 1}, "linear attention": dict.fromkeys(ROLES, 3)}


def deep_network(case: str, seed: int) -> nn.Module:
    """Return the network of a case."""
    module = transformer(seed, **DEPTH_CASES[case])
    if case == "W_O = identity":
        with torch.no_grad():
            module.get_parameter("L0.W_O").copy_(torch.eye(WIDTH, dtype=torch.float64))
    return module


def _depth_pieces(cfg: Config) -> dict[str, Callable[[], NormSweep]]:
    """Return a sweep over small σ for every case."""
    options = {"seeds": cfg.count, "sequences": cfg.sequences}
    return {
        f"depth.{case}": partial(
            sweep, partial(deep_network, case), DEPTH_SCALES.get(case, SMALL), "L*.W_[QKV]", **options
        )
        for case in DEPTH_CASES
    }


def _depth_orders(case: str, found: NormSweep) -> dict[str, tuple[np.ndarray, float]]:
    """Return slopes over seeds and the paper's exponent, by block and part."""
    return {
        f"{case}: {part}({block})": (exponents(found.sigma, found.curve(part, block)), power)
        for (part, role), power in ORDERS.items()
        for block in found.blocks
        if block.endswith(role)
    }


def _depth_answers(found: Found) -> list[Answer]:
    """Return a verdict for each change of the layer."""
    rows = []
    for claim, cases in DEPTH_CLAIMS.items():
        slopes: dict[str, tuple[np.ndarray, float]] = {}
        for case in cases:
            slopes |= _depth_orders(case, found[f"depth.{case}"])
        worst, words, verdict = same_orders(slopes)
        expected = "H_o: Q, K 6, V 2; H: Q, K 5, V 2"
        rows.append(answer(1, claim, expected, worst, verdict, measured=words, source=PAPER))
    return rows


def with_targets(case: str, sequences: int, seed: int, sigma: float) -> Problem:
    """Return one layer on the sums, with squared error unless the case is cross-entropy."""
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


def _dropped_pieces(cfg: Config) -> dict[str, Callable[[], NormSweep]]:
    """Return a sweep for every kind of target."""
    return {
        f"dropped.{case}": partial(
            sweep_of, partial(with_targets, case, cfg.sequences), DROPPED_SIGMA, "L0.W_[QV]", seeds=cfg.count
        )
        for case in TARGETS
    }


def _slope_order(found: NormSweep) -> np.ndarray:
    """Exponent of ‖∂ℓ/∂F‖ for small σ: (seeds,)."""
    return exponents(found.sigma, found.slope, high=SMALL[-1])


def _functional_order(found: NormSweep) -> np.ndarray:
    """Exponent of ‖H_f(W_Q)‖ for small σ: (seeds,)."""
    return exponents(found.sigma, found.curve("H_f", BLOCK), high=SMALL[-1])


def _dropped_answers(found: Found) -> list[Answer]:
    """Return answers on the slope of ∂ℓ/∂F, its effect on H_f, its bound, and the fitted case."""
    sweeps = {case: found[f"dropped.{case}"] for case in POWER_LAWS}
    own = {case: mean_interval(_slope_order(one)) for case, one in sweeps.items()}
    parts = {case: mean_interval(_functional_order(one)) for case, one in sweeps.items()}
    rows = [
        _by_case("∂ℓ/∂F does not depend on σ, so it can be dropped", own, 0, PAPER),
        _by_case("‖H_f(W_Q)‖ ~ σ^5 for all targets", parts, 5, PAPER),
    ]
    rest = np.stack([_functional_order(one) - _slope_order(one) for one in sweeps.values()])
    worst = rest[np.abs(rest - 5).max(1).argmax()]
    claim = "H_f(W_Q) over ∂ℓ/∂F grows as σ^5 in every case"
    rows.append(answer(2, claim, "5", mean_interval(worst), holds_where({"all": mean_interval(worst)}, 5)))
    return [*rows, _bounded(found["dropped.cross-entropy"]), _fit(found["dropped.fitted at σ = 0.1"])]


def _by_case(claim: str, means: Mapping[str, Interval], power: float, source: str) -> Answer:
    words = "; ".join(f"{case} σ^{mean.value:.2f}" for case, mean in means.items())
    worst = max(means.values(), key=lambda mean: abs(mean.value - power))
    verdict = holds_where(means, power)
    return answer(2, claim, f"σ^{power:g}", worst, verdict, measured=words, source=source)


def _bounded(one: NormSweep) -> Answer:
    """Check ‖p − y‖ ≤ √2 over all scales, by the largest value per seed."""
    largest = mean_interval(one.slope.max(1))
    over = f"root mean square from {one.slope.min():.3f} to {one.slope.max():.3f} for σ from 0.0003 to 10"
    verdict = HOLDS if one.slope.max() <= BOUND else FAILS
    return answer(2, "for cross-entropy ∂ℓ/∂F is bounded by √2 at every σ", "√2", largest, verdict,
                  measured=over, source=OURS)  # fmt: skip


def _fit(one: NormSweep) -> Answer:
    """Compare ‖H_f‖/‖H_o‖ of W_Q where F = Y with the neighboring scales."""
    share = one.curve("H_f", BLOCK) / one.curve("H_o", BLOCK)
    place = int(np.abs(one.sigma - FITTED).argmin())
    here, beside = mean_interval(share[:, place]), share[:, [place - 1, place + 1]].min()
    verdict = HOLDS if share[:, place].max() < 1e-10 < beside else FAILS
    words = (
        f"‖H_f‖/‖H_o‖ of W_Q at most {share[:, place].max():.1e} at the fit, "
        f"at least {beside:.1e} at neighboring scales"
    )
    claim = "if the network fits (F = Y), the order is trivial: H_f is zero"
    return answer(2, claim, "0", here, verdict, measured=words, source=OURS)


def _architecture_pieces(cfg: Config) -> dict[str, Callable[[], NormSweep]]:
    """Return a sweep of all blocks for every network."""
    options = {"seeds": cfg.count, "sequences": cfg.sequences}
    return {f"architecture.{name}": partial(sweep, make, ARCHITECTURE_SIGMA, **options)
            for name, make in ARCHITECTURES.items()}  # fmt: skip


def block_orders(found: NormSweep, part: str = "H") -> np.ndarray:
    """Exponents for small σ: (seeds, blocks)."""
    return np.stack(
        [exponents(found.sigma, found.curve(part, block), high=SMALL[-1]) for block in found.blocks], axis=1
    )


def spread(found: NormSweep, part: str = "H") -> Interval:
    """Largest minus smallest exponent among the blocks."""
    return mean_interval(np.ptp(block_orders(found, part), axis=1))


def unlike(found: NormSweep) -> Interval:
    """Decades between the largest and the smallest root mean square entry of a block of H at σ = 1."""
    entries = [found.curve("H", b)[:, -1] / n for b, n in zip(found.blocks, found.sizes, strict=True)]
    return mean_interval(np.ptp(np.log10(np.stack(entries)), axis=0))


def _architecture_answers(found: Found) -> list[Answer]:
    """Return one row per network, and the question itself for H_o and for H."""
    sweeps = {name: found[f"architecture.{name}"] for name in ARCHITECTURES}
    return [*(_one_order(name, one) for name, one in sweeps.items()),
            *(_special(sweeps, part) for part in ("H_o", "H")), _unlike(sweeps)]  # fmt: skip


def _one_order(name: str, one: NormSweep) -> Answer:
    """Verdict on whether all blocks of H grow with one exponent."""
    shown = ", ".join(
        f"{block.removeprefix('L0.')} {mean:.2f}"
        for block, mean in zip(one.blocks, block_orders(one).mean(0), strict=True)
    )
    apart = spread(one)
    source = PAPER if name in ("Transformer", "MLP") else OURS
    claim = f"{name}: all blocks of H grow with one order"
    words = f"{shown}; largest minus smallest {apart:.2f}"
    return answer(3, claim, "one", apart, below(apart, APART), measured=words, source=source)


def _special(sweeps: Mapping[str, NormSweep], part: str) -> Answer:
    """Verdict on whether no other network has blocks of different order."""
    found = {name: spread(one, part) for name, one in sweeps.items()}
    verdict = only_first({name: above(mean, APART) for name, mean in found.items()})
    words = "largest minus smallest exponent: " + ", ".join(f"{n} {m.value:.2f}" for n, m in found.items())
    claim = f"blocks of {part} of different order are specific to Transformers"
    return answer(3, claim, "yes", found[FIRST], verdict, measured=words, source=PAPER)


def only_first(verdicts: Mapping[str, str]) -> str:
    """Verdict on “only the Transformer has this property”, from a verdict for each network."""
    if verdicts[FIRST] != HOLDS:
        return verdicts[FIRST]
    others = [name for name, verdict in verdicts.items() if name != FIRST and verdict == HOLDS]
    if len(others) == len(verdicts) - 1:
        return FAILS
    return f"holds with exceptions: {', '.join(others)}" if others else HOLDS


def _unlike(sweeps: Mapping[str, NormSweep]) -> Answer:
    """Compare entry sizes at σ = 1, the Transformer against the most heterogeneous other network."""
    found = {name: unlike(one) for name, one in sweeps.items()}
    most = max((name for name in found if name != FIRST), key=lambda name: found[name].value)
    more, least = found[FIRST], found[most].high
    words = ", ".join(f"{name} {mean:.2f}" for name, mean in found.items())
    claim = "at σ = 1 the blocks of the Transformer differ most (in decades of entry size)"
    return answer(3, claim, f"more than {most}", more, above(more, least), measured=words)


def _network(case: str, seed: int) -> nn.Module:
    changes: dict[str, dict[str, Any]] = {
        "softmax": {},
        "softmax, Pre-LN": {"norm": "pre", "norm_eps": EPS},
        "linear attention": {"attention": "linear", "d_ff": 0, "residual": False},
    }
    return ARCHITECTURES["MLP"](seed) if case == "MLP" else transformer(seed, **changes[case])


def _squared(sequences: int, seed: int, sigma: float) -> Problem:
    """Return linear attention without skips under squared error, as in the paper."""
    batch = addition_batch(sequences, "onehot_next")
    X = sigma * embedded(batch, seed)
    return problem(_network("linear attention", seed), X, batch.targets, batch.weights, "mse_mean")


def _regime_pieces(cfg: Config) -> dict[str, Callable[[], NormSweep]]:
    """Return a sweep over six decades for every network."""
    found: dict[str, Callable[[], NormSweep]] = {}
    for case in SETTINGS:
        blocks = SETTING_BLOCKS.get(case, ("L0.W_[QKVO]",))
        if case == "linear attention":
            at = partial(_squared, cfg.sequences)
            found[f"regime.{case}"] = partial(sweep_of, at, cfg.decades, *blocks, seeds=cfg.count)
        else:
            options = {"seeds": cfg.count, "sequences": cfg.sequences}
            found[f"regime.{case}"] = partial(sweep, partial(_network, case), cfg.decades, *blocks, **options)
    return found


def regimes_of(one: NormSweep, part: str, block: str) -> list[list[Regime]]:
    """Regimes of a block for each seed."""
    return [regimes(one.sigma, curve) for curve in one.curve(part, block)]


def _regime_answers(found: Found) -> list[Answer]:
    """Return, for each exponent, the range of σ in which it is the slope, and the slopes before and after."""
    rows = []
    for case, part, block, power, source in LAWS:
        one = found[f"regime.{case}"]
        what = f"{case}, {part}({block.removeprefix('L0.')})"
        rows.append(judge_law(what, power, source, one.sigma, regimes_of(one, part, block)))
    return [
        *rows,
        *(judge_tail(found["regime.softmax, Pre-LN"], block, power) for block, power in TAILS.items()),
    ]


def judge_tail(one: NormSweep, block: str, power: float) -> Answer:
    """Verdict on the power of a block of H for large σ."""
    slope = mean_interval(exponents(one.sigma, one.curve("H", block), low=FAR))
    verdict = HOLDS if is_order(slope, power) else OPEN if slope.low <= power <= slope.high else FAILS
    claim = f"softmax, Pre-LN, H({block.removeprefix('L0.')}) ~ σ^{power:g} for σ from {FAR:g} to 100"
    return answer(4, claim, f"σ^{power:g}", slope, verdict, source=OURS)


def judge_law(what: str, power: float, source: str, sigma: np.ndarray, curves: list[list[Regime]]) -> Answer:
    """Verdict on one power for all σ: in every seed, the regime with the nearest slope decides."""
    claim, expected = f"{what} ~ σ^{power:g} over six decades", f"σ^{power:g}"
    if not all(curves):
        none = Interval(math.nan, math.nan, math.nan)
        return answer(4, claim, expected, none, OPEN, measured="a seed without a regime", source=source)
    nearest = [min(own, key=lambda regime: abs(regime.slope - power)) for own in curves]
    slope = mean_interval(np.array([regime.slope for regime in nearest]))
    begin, end = (
        geometric_interval(np.array([getattr(r, side) for r in nearest])) for side in ("low", "high")
    )
    whole = begin.value <= sigma[0] * 1.001 and end.value >= sigma[-1] * 0.999
    words = f"slope {slope:.2f} for σ from {begin.value:.2g} to {end.value:.2g}{_others(curves, nearest)}"
    if not is_order(slope, power):
        verdict = FAILS
    else:
        verdict = HOLDS if whole else f"holds with σ from {begin.value:.2g} to {end.value:.2g}"
    return answer(4, claim, expected, slope, verdict, measured=words, source=source)


def _others(curves: list[list[Regime]], nearest: list[Regime]) -> str:
    """Slopes of the other regimes, if every seed has one before or after."""
    words = ""
    for when, side in (("before", 0), ("after", -1)):
        others = [own[side] for own in curves]
        if all(other is not near for other, near in zip(others, nearest, strict=True)):
            words += f"; {when} it {mean_interval(np.array([other.slope for other in others])):.2f}"
    return words


def gradient_order(one: NormSweep, part: str, role: str) -> np.ndarray:
    """Exponent for small σ: (seeds,)."""
    return exponents(one.sigma, one.curve(part, f"L0.{role}"), high=HIGH)


def apart(one: NormSweep, part: str) -> np.ndarray:
    """Ratio ‖block of W_V‖ / ‖block of W_Q‖ at σ = 0.1, in decades: (seeds,)."""
    place = int(np.abs(np.log(one.sigma / AT)).argmin())
    return np.log10(one.curve(part, "L0.W_V")[:, place] / one.curve(part, "L0.W_Q")[:, place])


def _gradient_answers(found: Found) -> list[Answer]:
    """Return exponents with and without softmax, twice the exponents, and the distance of W_V and W_Q."""
    rows = []
    for case, powers in GRADIENT.items():
        one = found[f"regime.{case}"]
        slopes = {
            role: (gradient_order(one, "gradient", role), float(power)) for role, power in powers.items()
        }
        worst, words, verdict = same_orders(slopes)
        said = ", ".join(f"{role} {power}" for role, power in powers.items())
        exact = ", ".join(f"{role} {values.mean():.2f}" for role, (values, _) in slopes.items())
        rows.append(answer(6, f"{case}: orders of the gradient's blocks", said, worst, verdict,
                           measured=f"{exact} ({words})"))  # fmt: skip
    return [*rows, *_twice(found["regime.softmax"]), _wider(found["regime.softmax"])]


def _twice(one: NormSweep) -> list[Answer]:
    """Verdict on whether a block of H_o, and of H, grows with twice the exponent of its gradient."""
    rows = []
    for part in ("H_o", "H"):
        rest = {
            role: mean_interval(gradient_order(one, part, role) - 2 * gradient_order(one, "gradient", role))
            for role in ROLES
        }
        words = ", ".join(f"{role} {mean.value:+.2f}" for role, mean in rest.items())
        worst = max(rest.values(), key=lambda mean: abs(mean.value))
        claim = f"exponents of {part} are twice the gradient's"
        rows.append(answer(6, claim, "difference 0", worst, holds_where(rest, 0), measured=words))
    return rows


def _wider(one: NormSweep) -> Answer:
    """Compare the decades between W_V and W_Q in H with those in the gradient."""
    found = {part: mean_interval(apart(one, part)) for part in PARTS if part != "H_f"}
    more: Interval = mean_interval(apart(one, "H") - apart(one, "gradient"))
    words = ", ".join(f"{part} {mean:.2f}" for part, mean in found.items())
    claim = f"the Hessian is more heterogeneous than the gradient (‖W_V‖/‖W_Q‖ at σ = {AT:g})"
    return answer(6, claim, "more decades", more, above(more, 0), measured=f"decades: {words}")


QUESTIONS = (
    Question(
        1,
        "Do the orders of one layer survive depth, residual streams, heads, W_O, low-rank values?",
        _depth_answers,
        _depth_pieces,
    ),
    Question(
        2,
        "How large is the term that the O-notation drops, and when is the stated order trivial?",
        _dropped_answers,
        _dropped_pieces,
    ),
    Question(3, "Is it specific to Transformers?", _architecture_answers, _architecture_pieces),
    Question(4, "Six decades of σ: where do regimes change?", _regime_answers, _regime_pieces),
    Question(6, "The gradient: its orders and heterogeneity", _gradient_answers),
)
