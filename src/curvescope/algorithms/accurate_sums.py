"""Inner products and norms of vectors, summed in float64.

A vector is read in parts. Within a part, products of float32 entries are formed and summed pairwise in
float32, as `torch.sum` does. The rounding error is below one unit in the last place of Σ |xᵢ yᵢ|, while that
of a float32 dot product of a full vector is hundreds of units. Parts are added in float64. A float64 copy of
a part would cost more than twice the time. Squares of float32 numbers leave their range beyond 1e±19: callers
scale vectors to about one (`vectors.safe_vector_scale`); `norms` accepts any size.

Sums end in `sum_over_ranks`, which adds over ranks if vectors are sharded.

The module also decides if a matrix is zero except for rounding.

Computed products of a zero operator are not zero: for the key bias of attention, on which the softmax does
not depend, they give a matrix of rounding errors of arbitrary size. Rounding errors are not symmetric. So a
matrix that differs from its transpose by a large share of its norm is rounding, and is reported as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from curvescope.core.ranks.shard_layout import current_shard_group

CPU_CHUNK = 2**16  # entries at a time on a CPU: a dozen such rows fit in its cache
DEVICE_CHUNK = 2**22  # entries at a time on other devices


def sum_over_ranks(partial: Tensor) -> Tensor:
    """Return sums over all entries, given the sums over this process's entries."""
    group = current_shard_group()
    return partial if group is None else group.sum(partial)


def summing_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Convert to a float64 array on the CPU."""
    return tensor.detach().cpu().double().numpy()


def parts(length: int, device: torch.device, *, width: int = 1) -> Iterator[slice]:
    """Yield the rows 0, …, length − 1 of columns (length, width) in order, some at a time."""
    step = max(1, (CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK) // max(width, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of all vectors (n,) or columns (n, k), some at a time."""
    first = vectors[0]
    for p in parts(len(first), first.device, width=math.prod(first.shape[1:])):
        yield tuple(v[p] for v in vectors)


class DotSum:
    """Running sum Σ x y over parts of two vectors, or of each of their columns (n, k)."""

    def __init__(self, vectors: Tensor):
        step = next(parts(len(vectors), vectors.device, width=math.prod(vectors.shape[1:])), slice(0, 0)).stop
        self.memory = vectors.new_empty((step, *vectors.shape[1:]))
        self.total = vectors.new_zeros(vectors.shape[1:], dtype=summing_dtype(vectors.device))

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """Add the products of two parts (c,) or (c, k), or the squares of one."""
        self.total += torch.mul(x, x if y is None else y, out=self.memory[: len(x)]).sum(dim=0)

    def value(self) -> Tensor:
        """Return the sums, () or (k,), on the vectors' device."""
        return sum_over_ranks(self.total)

    def root(self) -> Tensor:
        """Return the norms, () or (k,), if squares were added."""
        return self.value().sqrt()


def inner(v: Tensor, w: Tensor) -> Tensor:
    """v · w of two vectors (n,): a number on their device."""
    return column_dots(v, w)


def column_dots(V: Tensor, W: Tensor) -> Tensor:
    """vⱼ · wⱼ for each column of (n, k), (k,) on the columns' device; of vectors (n,), a number."""
    if V.dim() == 2 and V.shape[1] == 1:
        return column_dots(V[:, 0], W[:, 0])[None]
    total = DotSum(V)
    for x, y in chunks(V, W):
        total.add(x, y)
    return total.value()


def norms(x: Tensor, *, dim: int | None = None) -> Tensor:
    """Euclidean norms along `dim`, or of all of x, of any size; in x's dtype.

    A float32 sum of squares on a CPU is wrong by 2e-4 for vectors of half a million entries that differ in
    size, and a Lanczos basis normalized with it is not orthonormal.
    """
    if dim is None:
        return norms(x.reshape(-1, 1), dim=0)[0]
    columns = x if dim == 0 else x.T
    wide = summing_dtype(x.device)
    total = x.new_zeros(columns.shape[1], dtype=wide)
    for p in parts(len(columns), x.device, width=columns.shape[1]):
        total += torch.linalg.vector_norm(columns[p], dim=0, dtype=wide).square_()
    return sum_over_ranks(total).sqrt().to(x.dtype)


def dots(rows: Tensor, w: Tensor) -> Tensor:
    """Inner products of the rows (m, n) with w (n,), added up in float64: (m,)."""
    total = torch.zeros(rows.shape[0], dtype=summing_dtype(w.device), device=w.device)
    for p in parts(len(w), w.device):
        total += rows[:, p] @ w[p]
    return sum_over_ranks(total)


def gram(rows: Tensor, others: Tensor) -> np.ndarray:
    """rows @ othersᵀ for (k, n) and (k, n) in float64, some entries at a time.

    A float32 product of long rows is wrong by 2e-4 when their entries differ much in size.
    """
    wide = summing_dtype(rows.device)
    total = torch.zeros(rows.shape[0], others.shape[0], dtype=wide, device=rows.device)
    for p in parts(rows.shape[1], rows.device, width=rows.shape[0]):
        total += rows[:, p].to(wide) @ others[:, p].to(wide).T
    return to_numpy(sum_over_ranks(total))


MIN_ASYMMETRY = 0.05  # ‖A − Aᵀ‖ / 2‖A‖: 0.2 to 0.6 for rounding errors, below 1e-6 otherwise


def is_rounding(A: np.ndarray, asymmetry: float) -> bool:
    """Return True if a matrix that should be symmetric is mostly rounding, judged by ‖A − Aᵀ‖_F / 2."""
    return asymmetry > 0 and asymmetry >= MIN_ASYMMETRY * frobenius_length(A)


def frobenius_length(A: np.ndarray) -> float:
    """Frobenius norm, also if squares of the entries are out of range."""
    return math.hypot(*A.ravel().tolist())
