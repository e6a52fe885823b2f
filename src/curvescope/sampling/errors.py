"""Numbers of an operator with their numerical and their sampling error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import eigsh
from curvescope.algorithms.checks import check_choice, check_count
from curvescope.algorithms.columns import probe_batches
from curvescope.core.errors import ShapeError
from curvescope.core.operator import LinearOperator
from curvescope.operators.base import CurvatureOperator
from curvescope.sampling.groups import MOST_GROUPS, Split, split_sample
from curvescope.sampling.statistics import (
    SIZES,
    Sampled,
    degrees_of,
    influences_of,
    interval,
    jackknife,
    linear_influences,
    others,
    two_way,
)

Quantity = Literal["trace", "form", "norm", "largest", "smallest"]
End = Literal["largest", "smallest"]
NAMES = {"trace": "trace", "form": "vᵀ H v", "norm": "‖·‖_F", "largest": "λ_max", "smallest": "λ_min"}
WARM_STEPS = 6  # most Lanczos steps on a part of the data
CLOSE = 5e-3  # relative error at which Lanczos on a part stops; the spread over parts is far larger


def sampling_error(
    op: CurvatureOperator,
    quantity: Quantity = "trace",
    *,
    num_probes: int = 8,
    vector: Tensor | None = None,
    unit: int = 1,
    groups: int = MOST_GROUPS,
    seed: int = 0,
) -> Sampled:
    """Measure one number of an operator with its numerical and its sampling error.

    Args:
        op: Hessian, GGN or another curvature operator on a problem.
        quantity: `trace`; `form`, vᵀ C v of a vector; `norm`, the Frobenius norm; `largest` or `smallest`
            eigenvalue.
        num_probes: Random vectors of `trace` and `norm`, at least 2.
        vector: The vector v of `form`, or an approximate eigenvector as a start.
        unit: Number of consecutive sequences that belong together, such as the sequences of one document.
            These are correlated, so single sequences would give too small an error.
        groups: Most groups of units that the sample is split into.
        seed: Seed of the probes and of the eigenvalue search.
    """
    check_choice("quantity", quantity, get_args(Quantity))
    check_count("num_probes", num_probes, at_least=2)
    split = split_sample(op, unit=unit, most=groups)
    if quantity in ("largest", "smallest"):
        return _ends(split, [quantity], seed, v0=vector)[quantity]
    if quantity == "form":
        if vector is None or vector.shape != (op.shape[0],):
            got = "none" if vector is None else f"shape {tuple(vector.shape)}"
            raise ShapeError(f"expected a vector of {op.shape[0]} entries for vᵀ C v, got {got}")
        with split.frozen():
            return form_of(split, split.forms(vector[:, None])[0])
    return _probed(split, (quantity,), num_probes, seed)[quantity]


def sampling_errors(
    op: CurvatureOperator,
    quantities: Sequence[Quantity] = ("trace", "norm", "largest", "smallest"),
    *,
    num_probes: int = 8,
    unit: int = 1,
    seed: int = 0,
) -> dict[Quantity, Sampled]:
    """Measure several numbers of an operator like `sampling_error`, from shared products."""
    for quantity in quantities:
        check_choice("quantity", quantity, ("trace", "norm", "largest", "smallest"))
    split = split_sample(op, unit=unit)
    linear: list[Quantity] = [q for q in ("trace", "norm") if q in quantities]
    ends: list[End] = [q for q in ("largest", "smallest") if q in quantities]
    numbers: dict[Quantity, Sampled] = {**_probed(split, linear, num_probes, seed)} if linear else {}
    numbers |= {**_ends(split, ends, seed)} if ends else {}
    return {quantity: numbers[quantity] for quantity in quantities}


def _ends(split: Split, ends: Sequence[End], seed: int, *, v0: Tensor | None = None) -> dict[End, Sampled]:
    """Measure extreme eigenvalues, both ends in one search."""
    which = "BE" if len(ends) > 1 else "LA" if ends[0] == "largest" else "SA"
    pairs = eigsh(split.op, len(ends), which=which, seed=seed, v0=v0)
    assert pairs.vectors is not None
    order = np.argsort(pairs.values)[:: -1 if ends[0] == "largest" else 1].copy()
    return extremes(split, pairs.vectors[:, order], pairs.residuals[order], tuple(ends))


def _probed(
    split: Split, quantities: Sequence[Quantity], num_probes: int, seed: int
) -> dict[Quantity, Sampled]:
    """Measure trace and norm from the same probes."""
    make = {"trace": (split.forms, trace_of), "norm": (split.grams, norm_of)}
    numbers: dict[Quantity, Sampled] = {}
    with split.frozen():
        for quantity in quantities:
            products, number = make[quantity]
            batches = probe_batches(split.op, num_probes, seed=seed, what=quantity)
            numbers[quantity] = number(split, np.concatenate([products(V) for V in batches]))
    return numbers


# --------------------------------------------------------------------------------------- linear in the data


class Measured(NamedTuple):
    """A number that is known from more probes, or better, than from the groups."""

    value: float
    numerical: float
    probes: int


def trace_of(
    split: Split,
    forms: np.ndarray,
    *,
    psd: bool | None = None,
    quantity: str = "trace",
    measured: Measured | None = None,
) -> Sampled:
    """The trace with both errors.

    Args:
        split: The groups of the sample.
        forms: vᵀ C_g v of P probes on G groups, (P, G).
        psd: True if the trace cannot be negative; by default as the operator.
        quantity: Name of the number.
        measured: The trace from other probes, if there are more of them.
    """
    values = forms @ split.weights
    influences = linear_influences(forms, split.weights)
    numerical, sampling = two_way(values, influences)
    known = measured or Measured(float(values.mean()), numerical, len(forms))
    positive = split.op.psd if psd is None else psd
    return _sampled(split, quantity, known, sampling, influences.mean(axis=0), positive=positive)


def form_of(
    split: Split, forms: np.ndarray, *, measured: Measured | None = None, quantity: str = "form"
) -> Sampled:
    """vᵀ C v of one vector with its sampling error, from vᵀ C_g v of each group, (G,).

    If v is a unit eigenvector of an extreme eigenvalue, this is also the sampling error of the eigenvalue, to
    first order.
    """
    value = float(forms @ split.weights)
    influences = linear_influences(forms, split.weights)
    sampling = two_way(np.array([value]), influences[None])[1]
    known = measured or Measured(value, 0.0, 0)
    positive = split.op.psd or (measured is not None and known.value > 0)
    return _sampled(split, quantity, known, sampling, influences, positive=positive)


def eigenvalue_error(
    op: CurvatureOperator,
    vector: Tensor,
    *,
    value: float,
    residual: float = 0.0,
    unit: int = 1,
    groups: int = MOST_GROUPS,
) -> Sampled:
    """An eigenvalue that is known already, with its sampling error to first order.

    This costs one product of the operator with the eigenvector, group by group, and gives no trend. It is
    meant for numbers that are measured again and again, such as λ_max during training.

    Args:
        op: Hessian, GGN or another curvature operator on a problem.
        vector: The eigenvector (n,), of any length.
        value: The eigenvalue.
        residual: ‖C v − λ v‖ of the unit vector.
        unit: Number of consecutive sequences that belong together.
        groups: Most groups of units that the sample is split into.
    """
    split = split_sample(op, unit=unit, most=groups)
    with split.frozen():
        forms = split.forms((vector / vector.norm())[:, None])[0]
    return form_of(split, forms, measured=Measured(value, residual, 0), quantity="λ_max")


# ---------------------------------------------------------------------------------------------------- norms


def norm_of(split: Split, grams: np.ndarray, *, quantity: str = "norm") -> Sampled:
    """The Frobenius norm with both errors, from ⟨C_g v, C_h v⟩ of P probes on G groups, (P, G, G).

    ‖C‖² = E ‖Σ_g w_g C_g v‖² is a quadratic form in these products. So are the norm without one group and the
    norm on a part of the groups. With few data the noise of the sample adds to the norm: it falls as the
    sample grows.
    """
    w, G = split.weights, len(split)
    squares = np.einsum("pgh,g,h->p", grams, w, w)
    value = math.sqrt(float(squares.mean()))
    influences = np.zeros((len(grams), G))
    if G > 1:
        cross, own = grams @ w, np.diagonal(grams, axis1=1, axis2=2)
        without = (squares[:, None] - 2 * w * cross + w**2 * own) / others(w) ** 2
        influences = influences_of(squares[:, None], without)
    slope = 1 / (2 * value) if value > 0 else 0.0
    numerical, sampling = (slope * error for error in two_way(squares, influences))
    trend = _trend(split, lambda part: _norm_of_part(grams, w, part), value)
    known = Measured(value, numerical, len(grams))
    mean = slope * influences.mean(axis=0)
    return _sampled(split, quantity, known, sampling, mean, positive=True, trend=trend)


def _norm_of_part(grams: np.ndarray, w: np.ndarray, part: Sequence[int]) -> float:
    """The norm on a part of the groups."""
    shares = w[part] / w[part].sum()
    return math.sqrt(float(np.einsum("pgh,g,h->p", grams[:, part][:, :, part], shares, shares).mean()))


def _trend(split: Split, value_of: Callable[[Sequence[int]], float], whole: float) -> np.ndarray:
    """Mean over runs of G/4 groups, mean over runs of G/2 groups, and the whole; nan with too few groups."""
    G, means = len(split), []
    for parts in SIZES[:-1]:
        length = G // parts
        if parts > G or G < 2:
            means.append(math.nan)
            continue
        runs = [[(first + i) % G for i in range(length)] for first in range(G)]
        means.append(float(np.mean([value_of(run) for run in runs])))
    return np.array([*means, whole])


# ---------------------------------------------------------------------------------------------- eigenvalues


class _Part(NamedTuple):
    """The extreme eigenvalues on a part of the data, and their vectors."""

    values: list[float]
    vectors: Tensor  # (n, ends)


def extremes(
    split: Split,
    vectors: Tensor,
    residuals: np.ndarray,
    ends: tuple[End, ...] = ("largest", "smallest"),
    *,
    values: np.ndarray | None = None,
) -> dict[End, Sampled]:
    """Extreme eigenvalues with both errors, and their trend from quarters over halves to the whole.

    Lanczos on each quarter and half starts from the eigenvectors of the whole. The eigenvalue without one
    group is that in the span of all these vectors, which is correct to second order.

    Args:
        split: The groups of the sample.
        vectors: Eigenvectors of the whole (n, ends), in the order of `ends`.
        residuals: ‖C v − λ v‖ of each, (ends,).
        ends: Which end of the spectrum each column belongs to.
        values: The eigenvalues, if they are known better than from these vectors.
    """
    is_top = [end == "largest" for end in ends]
    parts: dict[int, list[_Part]] = {}
    for count in SIZES[:-1]:
        parts[count] = [_warm_ends(split.union(groups), vectors, is_top) for groups in split.cuts(count)]
    columns = [vectors, *(part.vectors for several in parts.values() for part in several)]
    basis = torch.linalg.qr(torch.cat(columns, 1))[0]
    with split.frozen():
        matrices = split.projected(basis)
    numbers: dict[End, Sampled] = {}
    for i, end in enumerate(ends):
        value, influences, sampling = _jackknifed(split, matrices, -1 if is_top[i] else 0)
        means = [_mean([part.values[i] for part in parts[count]]) for count in SIZES[:-1]]
        numbers[end] = _sampled(
            split,
            end,
            Measured(value if values is None else float(values[i]), float(residuals[i]), 0),
            sampling,
            influences,
            positive=split.op.psd or (value > 0) == is_top[i],
            trend=np.array([*means, value]),
        )
    return numbers


def extreme_in_span(split: Split, vectors: Tensor, end: End, measured: Measured) -> Sampled:
    """An extreme eigenvalue with both errors and its trend, from one pass of products.

    All eigenvalues are those in the span of the given vectors, correct to second order if these are
    eigenvectors of parts of the data, such as its quarters. This costs one product for each vector.

    Args:
        split: The groups of the sample.
        vectors: Eigenvectors of parts of the data, (n, k).
        end: Which end of the spectrum.
        measured: The eigenvalue of the whole and its residual.
    """
    at = -1 if end == "largest" else 0
    with split.frozen():
        matrices = split.projected(torch.linalg.qr(vectors)[0])
    value, influences, sampling = _jackknifed(split, matrices, at)
    means = [
        _mean([_end_of(matrices, split.weights, part, at) for part in split.cuts(count)])
        for count in SIZES[:-1]
    ]
    positive = split.op.psd or (measured.value > 0) == (end == "largest")
    trend = np.array([*means, value])
    return _sampled(split, end, measured, sampling, influences, positive=positive, trend=trend)


def _end_of(matrices: np.ndarray, w: np.ndarray, part: Sequence[int], at: int) -> float:
    """The eigenvalue at one end of the mean over a part of the groups."""
    shares = w[part] / w[part].sum()
    return float(np.linalg.eigvalsh(np.einsum("g,gij->ij", shares, matrices[part]))[at])


def _jackknifed(split: Split, matrices: np.ndarray, at: int) -> tuple[float, np.ndarray, float]:
    """The eigenvalue at one end in a span, the influence of each group, and its sampling error."""
    w, G = split.weights, len(split)
    mean = np.einsum("g,gij->ij", w, matrices)
    value = float(np.linalg.eigvalsh(mean)[at])
    if G < 2:
        return value, np.zeros(G), math.nan
    rest = others(w)
    without = np.array([np.linalg.eigvalsh((mean - w[g] * matrices[g]) / rest[g])[at] for g in range(G)])
    return value, influences_of(np.array(value), without), jackknife(value, without)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _warm_ends(op: LinearOperator, vectors: Tensor, is_top: Sequence[bool]) -> _Part:
    """Both ends of the spectrum on a part of the data, from a few Lanczos steps that start at `vectors`."""
    Q = (vectors.sum(1) / vectors.sum(1).norm())[:, None]
    products: list[Tensor] = []
    with op.frozen():
        while True:
            products.append((op @ Q[:, -1:])[:, 0])
            T = (Q.T @ torch.stack(products, dim=1)).double().cpu().numpy()
            theta, S = np.linalg.eigh((T + T.T) / 2)
            outside = products[-1] - Q @ (Q.T @ products[-1])
            outside = outside - Q @ (Q.T @ outside)
            beta = float(outside.norm())
            at = [len(theta) - 1 if top else 0 for top in is_top]
            if len(products) >= min(WARM_STEPS + len(is_top), op.shape[0]) or _is_close(theta, S, beta, at):
                break
            Q = torch.cat([Q, (outside / beta)[:, None]], dim=1)
    return _Part([float(theta[i]) for i in at], Q @ torch.as_tensor(S[:, at]).to(Q))


def _is_close(theta: np.ndarray, S: np.ndarray, beta: float, at: Sequence[int]) -> bool:
    """Return True if every end is known to `CLOSE`: its error is at most residual² / gap to the next."""
    if beta <= 1e-6 * float(np.abs(theta).max()):
        return True
    if len(theta) < 2 * len(at):
        return False
    for i in at:
        gap = float(np.abs(np.delete(theta, i) - theta[i]).min())
        residual = beta * abs(float(S[-1, i]))
        if residual**2 > CLOSE * abs(float(theta[i])) * max(gap, residual):
            return False
    return True


def _sampled(
    split: Split,
    quantity: str,
    known: Measured,
    sampling: float,
    influences: np.ndarray,
    *,
    positive: bool,
    trend: np.ndarray | None = None,
) -> Sampled:
    crossing = quantity == "smallest" and not split.op.psd  # the sign of λ_min may be another on other data
    is_zero = quantity == "smallest" and split.op.psd and known.value <= known.numerical  # up to rounding
    positive = positive and not is_zero
    sign = -1.0 if known.value < 0 and positive else 1.0
    ends = interval(
        sign * known.value,
        known.numerical,
        sampling,
        known.probes,
        degrees_of(influences, split.weights),
        positive=positive,
        crossing=crossing,
    )
    low, high = sorted(sign * end for end in ends)
    if is_zero:  # no eigenvalue is negative
        low = max(low, min(known.value, 0.0))
    no_trend = np.array([math.nan, math.nan, known.value])
    return Sampled(
        quantity=NAMES.get(quantity, quantity),
        value=known.value,
        numerical=known.numerical,
        sampling=sampling,
        low=low,
        high=high,
        num_groups=len(split),
        num_probes=known.probes,
        unit=split.unit,
        num_terms=split.num_terms,
        trend=no_trend if trend is None or is_zero else trend,
        influences=influences,
        weights=split.weights,
    )
