"""Traces from random probes: Hutchinson, Hutch++ and XTrace, each with its standard error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_choice, check_count, check_slices, check_square
from curvescope.algorithms.columns import (
    apply,
    column_dots,
    gather_samples,
    mean_and_stderr,
    probe_batches,
    summing_dtype,
    to_numpy,
)
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result
from curvescope.core.seeds import Probe, probes

if TYPE_CHECKING:
    import pandas as pd

Method = Literal["hutchinson", "hutch++", "xtrace"]
FEWEST: dict[str, int] = {"hutchinson": 1, "hutch++": 6, "xtrace": 4}


@dataclass(frozen=True)
class TraceEstimate(Result):
    """Trace of an operator: the mean of `samples`, with its standard error (nan for one sample)."""

    value: float
    stderr: float
    samples: np.ndarray  # one for each probe that the error is taken over
    num_products: int
    method: str
    probe: str
    seed: int


@dataclass(frozen=True)
class BlockTraces(Result):
    """Traces of diagonal blocks, all from the same probes."""

    names: list[str]  # B blocks
    values: np.ndarray  # (B,)
    stderr: np.ndarray  # (B,)
    samples: np.ndarray  # (probes, B)
    num_products: int
    seed: int

    def to_frame(self) -> pd.DataFrame:
        """One row per block."""
        import pandas as pd

        return pd.DataFrame({"block": self.names, "trace": self.values, "stderr": self.stderr})


def trace(
    op: LinearOperator,
    *,
    num_probes: int = 32,
    method: Method = "hutchinson",
    probe: Probe = "rademacher",
    seed: int = 0,
) -> TraceEstimate:
    """Trace of a square operator from `num_probes` products, without bias.

    Args:
        num_probes: number of products; Hutch++ uses two thirds of them, XTrace all of them, to take out the
            dominant eigenspace. At least 6 and 4 for these.
        method: "hutchinson", the mean of vᵀ A v; "hutch++" (Meyer and others 2021), exact on a basis Q of
            A S and Hutchinson outside of it; "xtrace" (Epperly, Tropp and Webber 2024), the mean over i of
            Hutch++ with probe i left out of the sketch and used outside of it. The error of Hutch++ is
            that of its part outside. The error of XTrace is that of its leave-one-out estimates as if
            they were independent, which is up to a third too small when the spectrum decays fast.
    """
    check_square(op, "trace")
    check_choice("method", method, get_args(Method))
    check_choice("probe", probe, get_args(Probe))
    check_count(f"num_probes for {method}", num_probes, at_least=FEWEST[method])
    estimate = {"hutchinson": _hutchinson, "hutch++": _hutch_plus_plus, "xtrace": _xtrace}[method]
    samples, products = estimate(op, num_probes, probe, seed)
    mean, stderr = mean_and_stderr(samples)
    return TraceEstimate(float(mean), float(stderr), samples, products, method, probe, seed)


def block_traces(
    op: LinearOperator, slices: Mapping[str, slice] | None = None, *, num_probes: int = 32, seed: int = 0
) -> BlockTraces:
    """Traces of all diagonal blocks from the same Rademacher probes: Σ_{i in block} vᵢ (A v)ᵢ.

    Args:
        slices: rows of each block by name; by default the blocks of `op.space`.
    """
    check_square(op, "block_traces")
    check_count("num_probes", num_probes, at_least=1)
    blocks = check_slices(op, slices)
    pieces = []
    for V in probe_batches(op, num_probes, seed=seed, what="block traces"):
        product = V * (op @ V)
        sums = [product[rows].sum(dim=0, dtype=summing_dtype(V.device)) for rows in blocks.values()]
        pieces.append(torch.stack(sums, dim=1))
    samples = gather_samples(pieces)
    values, stderr = mean_and_stderr(samples)
    return BlockTraces(list(blocks), values, stderr, samples, num_probes, seed)


def _hutchinson(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> tuple[np.ndarray, int]:
    batches = probe_batches(op, num_probes, seed=seed, kind=kind, what="trace")
    return gather_samples([column_dots(V, op @ V) for V in batches]), num_probes


def _hutch_plus_plus(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> tuple[np.ndarray, int]:
    """tr(Qᵀ A Q) + gᵀ P A P g for each outer probe g, with P = I − Q Qᵀ and Q = orth(A S)."""
    n = op.shape[0]
    sketch = min(num_probes // 3, n)
    outer = num_probes - 2 * (num_probes // 3)
    S = _sketch(op, sketch, kind, seed)
    Q = torch.linalg.qr(apply(op, S))[0]
    inside = column_dots(Q, apply(op, Q)).sum()
    pieces = []
    for G in probe_batches(op, outer, seed=seed, kind=kind, first=sketch, what="trace"):
        G = G - Q @ (Q.T @ G)
        pieces.append(inside + column_dots(G, op @ G))
    return gather_samples(pieces), 2 * sketch + outer


def _xtrace(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> tuple[np.ndarray, int]:
    """Leave-one-out estimates from Y = A Ω = Q R and Z = A Q.

    The range of Y without column i is that of Q (I − sᵢ sᵢᵀ), where sᵢ is the unit vector orthogonal to
    the other columns of R: the normalised column i of R⁻ᵀ. With H = Qᵀ Z, W = Qᵀ Ω and
    uᵢ = (I − sᵢ sᵢᵀ) wᵢ, estimate i is tr H − sᵢᵀ H sᵢ + (ωᵢ − Q uᵢ)ᵀ A (ωᵢ − Q uᵢ).
    """
    count = num_probes // 2
    if count >= op.shape[0]:  # as many products write the operator out
        return np.full(count, np.trace(to_numpy(op.dense()))), op.shape[0]
    Omega = _sketch(op, count, kind, seed)
    Y = apply(op, Omega)
    Q, R = torch.linalg.qr(Y)
    Z = apply(op, Q)
    H, W, OmegaZ, QY = (to_numpy(M) for M in (Q.T @ Z, Q.T @ Omega, Omega.T @ Z, Q.T @ Y))
    S = _left_out(to_numpy(R), torch.finfo(op.dtype).eps)
    U = W - S * (S * W).sum(axis=0)
    outside = to_numpy(column_dots(Omega, Y)) - (OmegaZ.T * U).sum(axis=0) - (U * QY).sum(axis=0)
    outside += (U * (H @ U)).sum(axis=0)
    return np.trace(H) - (S * (H @ S)).sum(axis=0) + outside, 2 * count


def _left_out(R: np.ndarray, eps: float) -> np.ndarray:
    """Normalised columns of R⁻ᵀ; a singular R is moved by a rounding first, which keeps them orthogonal."""
    U, sigma, Vt = np.linalg.svd(R)
    floor = eps * sigma[0] if sigma[0] > 0 else 1.0
    S = (U / np.maximum(sigma, floor)) @ Vt
    return S / np.linalg.norm(S, axis=0)


def _sketch(op: LinearOperator, count: int, kind: Probe, seed: int) -> Tensor:
    return probes(op.shape[0], count, seed=seed, kind=kind, dtype=op.dtype, device=op.device)
