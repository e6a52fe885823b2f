"""The vector algebra of the algorithms: everything that adds up over the entries of a vector.

An algorithm keeps its vectors as rows (m, n), or columns (n, k) where a product takes them, and touches
their entries through these functions alone: random vectors, inner products, norms, projections, rotations,
and steps that are taken entry by entry (`chunks`). Sums over entries end in `add_up`: vectors that are
spread over several machines would need that one, and `random_vector`, to be told so, and no algorithm.

Long vectors are worked through some entries at a time: a part that was read serves several steps while it
is in the cache, and sums of float32 entries are carried in float64 without a second copy of the vector.
Nothing here takes memory of the length of a vector: to touch fresh memory costs more than to compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import together
from curvescope.core.seeds import drawn_on, generator

PART = 2**16  # entries at a time on a CPU: a dozen rows of them fit in its cache
WIDE_PART = 2**22  # entries at a time on other devices
DRAWN = 2**20  # random numbers at a time, a multiple of the sixteen that are drawn together
PASSES = 5  # of Gram–Schmidt; what still shrinks after them lies in the span of the basis
OVERLAP = 4.0  # roundings that a long vector may always keep of the basis
EXACT = 20.0  # roundings below which an overlap needs sums in float64
SEMI = 0.03  # square roots of a rounding that it may keep at most
COMFORT = {torch.float64: 100, torch.float32: 12}  # decades around one where squares and products are safe


class Remainder(NamedTuple):
    """What is left of a vector outside a basis of m rows."""

    taken: np.ndarray  # (m,) coefficients that were taken out
    norm: float  # of the rest; zero if nothing is left
    overlap: np.ndarray  # (m,) inner products of the basis with the rest, as measured


def add_up(partial: Tensor) -> Tensor:
    """Sums over all entries, from the sums over the entries that are here: all of them."""
    return partial


def summing_dtype(device: torch.device) -> torch.dtype:
    """float64, except on devices that do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A float64 array on the CPU."""
    return tensor.detach().cpu().double().numpy()


def parts(length: int, device: torch.device, *, width: int = 1) -> Iterator[slice]:
    """The rows 0, …, length − 1 of columns (length, width) in order, some at a time."""
    step = max(1, (PART if device.type == "cpu" else WIDE_PART) // max(width, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all of the vectors (n,), or columns (n, k), some at a time, to be written in place."""
    first = vectors[0]
    for p in parts(len(first), first.device, width=math.prod(first.shape[1:])):
        yield tuple(v[p] for v in vectors)


def fresh(like: LinearOperator | Tensor, *shape: int) -> Tensor:
    """Memory for vectors of the same dtype and device."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def random_vector(op: LinearOperator, *, seed: int, index: int, out: Tensor) -> None:
    """Overwrite `out` (n,) by the Gaussian vector of (seed, index), drawn as `core.seeds.probes` are."""
    source = generator(seed, index, device=drawn_on(len(out), out.device))
    for start in range(0, op.shape[1], DRAWN):
        piece = out[start : start + DRAWN]
        piece.copy_(torch.randn(len(piece), generator=source, dtype=torch.float32, device=source.device))


def factors(values: Tensor, like: Tensor) -> Tensor | float:
    """One factor for each column, (k,), as `add_multiple` takes them: a plain number for a single column."""
    return float(values) if len(values) == 1 else values.to(like.dtype)


def add_multiple(y: Tensor, x: Tensor, c: Tensor | float) -> Tensor:
    """y + x c for columns (m, k) and `factors` c, in place."""
    return y.addcmul_(x, c) if isinstance(c, Tensor) else y.add_(x, alpha=c)


def orthonormalize(Y: Tensor) -> Tensor:
    """Y = Q R for columns (n, k), n ≥ k: R (k, k), with Q in the place of Y.

    By parts of rows: Yᵢ = Qᵢ Rᵢ, and the Rᵢ under each other are P R, so that Q has the parts Qᵢ Pᵢ. LAPACK
    with several threads would take sixteen times the memory of a vector for the whole.
    """
    k = Y.shape[1]
    rows = Y.tensor_split(max(1, len(Y) // max(PART, k))) if Y.device.type == "cpu" else (Y,)
    triangles = []
    for part in rows:
        Q, R = torch.linalg.qr(part)
        part.copy_(Q)
        triangles.append(R)
    if len(rows) == 1:
        return triangles[0]
    P, R = torch.linalg.qr(torch.cat(triangles))
    for part, turn in zip(rows, P.split(k), strict=True):
        part.copy_(part @ turn)
    return R


class SquareSum:
    """Σ x² over parts of a vector, or of columns (n, k), as they come by; in float64."""

    def __init__(self, like: Tensor):
        self.wide = Wide(like)
        self.total = torch.zeros(like.shape[1:], dtype=self.wide.dtype, device=like.device)

    def add(self, part: Tensor) -> None:
        """Add the squares of a part (c,) or (c, k)."""
        x = self.wide(part)
        self.total += torch.dot(x, x) if x.dim() == 1 else x.square_().sum(dim=0)

    def root(self) -> Tensor:
        """The norms, () or (k,)."""
        return add_up(self.total).sqrt()


class Wide:
    """Parts of vectors in the dtype of sums, one after the other in the same memory."""

    def __init__(self, like: Tensor):
        self.dtype = summing_dtype(like.device)
        rows = next(parts(len(like), like.device, width=math.prod(like.shape[1:])), slice(0, 0)).stop
        self.memory = torch.empty((rows, *like.shape[1:]), dtype=self.dtype, device=like.device)

    def __call__(self, part: Tensor) -> Tensor:
        return self.memory[: len(part)].copy_(part)


def norms(x: Tensor, *, dim: int | None = None) -> Tensor:
    """Euclidean norms along `dim`, or of all of x, summed in float64; in x's dtype.

    A float32 sum of squares on a CPU is wrong by 2e-4 for vectors of half a million entries that differ in
    size, and a Lanczos basis normalised with it is not orthonormal.
    """
    if dim is None:
        return inner(x.reshape(-1), x.reshape(-1)).sqrt().to(x.dtype)
    if dim == 0 and x.dim() == 2:
        return column_dots(x, x).sqrt().to(x.dtype)
    return torch.stack([inner(row, row) for row in x]).sqrt().to(x.dtype) if len(x) else x.sum(dim=1)


def inner(v: Tensor, w: Tensor) -> Tensor:
    """v · w of two vectors (n,), summed in float64: a number on their device."""
    one, other = Wide(v), Wide(w)
    total = torch.zeros((), dtype=one.dtype, device=v.device)
    for x, y in chunks(v, w):
        total += torch.dot(one(x), other(y))
    return add_up(total)


def column_dots(V: Tensor, W: Tensor) -> Tensor:
    """vⱼ · wⱼ for each column, summed in float64, (k,) on the columns' device."""
    if V.shape[1] == 1:
        return inner(V[:, 0], W[:, 0])[None]
    one, other = Wide(V), Wide(W)
    total = torch.zeros(V.shape[1], dtype=one.dtype, device=V.device)
    for x, y in chunks(V, W):
        total += one(x).mul_(other(y)).sum(dim=0)
    return add_up(total)


def dots(rows: Tensor, w: Tensor) -> Tensor:
    """Inner products of the rows (m, n) with w (n,), added up in float64: (m,)."""
    total = torch.zeros(rows.shape[0], dtype=summing_dtype(w.device), device=w.device)
    for p in parts(len(w), w.device):
        total += rows[:, p] @ w[p]
    return add_up(total)


def orthogonalize(
    basis: Tensor,
    w: Tensor,
    *,
    out: Tensor | None = None,
    expected: np.ndarray | None = None,
    tol: float = 0.0,
) -> Remainder:
    """Take the span of the orthonormal rows of a basis (m, n) out of w (n,): in place, or into `out`.

    Classical Gram–Schmidt, repeated: each pass takes coefficients out, and reads the basis once for that and
    for the overlap that is left. The first takes out the `expected` ones, as a recurrence knows them, or
    measures them, which reads the basis once more. A long vector is done when its overlap, relative to its
    norm, is at most `tol` or a few roundings; otherwise twice is enough unless w lies in the span up to
    rounding. An overlap of up to the root of a rounding leaves eigenvalues of a projection right to a
    rounding (Simon 1984), but moves residuals by as much.
    """
    out = w if out is None else out
    if expected is None:
        overlap = dots(basis, w)
    else:
        overlap = torch.as_tensor(expected).to(dtype=summing_dtype(w.device), device=w.device)
    taken, before = torch.zeros_like(overlap), math.inf
    eps = torch.finfo(w.dtype).eps
    allowed = max(OVERLAP * eps, min(tol, SEMI * eps**0.5)) if len(w) > PART else 0.0
    guessed, exact = expected is not None, len(w) > PART and allowed < EXACT * eps
    for turn in range(PASSES + guessed):
        taken += overlap
        rest, overlap = _take_out(basis, overlap, w if turn == 0 else out, out, exact=exact)
        settled = turn > guessed and rest >= 0.5 * before
        if settled or float(overlap.norm()) <= allowed * rest or math.isnan(rest):
            return Remainder(to_numpy(taken), rest, to_numpy(overlap))
        before = rest
    return Remainder(to_numpy(taken), 0.0, to_numpy(overlap))


def _take_out(
    basis: Tensor, coefficients: Tensor, w: Tensor, out: Tensor, *, exact: bool
) -> tuple[float, Tensor]:
    """out = w − basisᵀ coefficients: its norm, and its inner products with the basis.

    These are wrong by up to 1e-5 of the norm if a part of float32 entries is summed as such, not `exact`.
    """
    c, squares = coefficients.to(w.dtype), SquareSum(out)
    total = torch.zeros_like(coefficients)
    for p in parts(len(w), w.device, width=min(len(basis), 8) if exact else 1):
        rows, x = basis[:, p], out[p]
        (x if w is out else x.copy_(w[p])).addmv_(rows.T, c, alpha=-1)  # w may be a column, strided
        squares.add(x)
        total += rows.to(total.dtype) @ x.to(total.dtype) if exact else rows @ x
    return float(squares.root()), add_up(total)


def three_terms(product: Tensor, q: Tensor, before: Tensor, beta: float) -> tuple[float, float]:
    """Overwrite `before` by product − α q − β before with α = q · product: α and the norm of the result."""
    alpha, squares = float(inner(q, product)), SquareSum(q)
    for x, y, z in chunks(before, product, q):
        x.mul_(-beta).add_(y) if beta else x.copy_(y)
        x.sub_(z, alpha=alpha)
        squares.add(x)
    return alpha, float(squares.root())


def rotate(rows: Tensor, S: np.ndarray) -> None:
    """Overwrite the first p rows of a basis (m, n) by Sᵀ rows for S (m, p), without a second copy of it."""
    R = torch.as_tensor(np.ascontiguousarray(S.T)).to(rows.dtype).to(rows.device)
    for p in parts(rows.shape[1], rows.device):
        rows[: R.shape[0], p] = R @ rows[:, p]


def gram(rows: Tensor, others: Tensor) -> np.ndarray:
    """rows @ othersᵀ for (k, n) and (k, n) in float64, some entries at a time.

    A float32 product of long rows is wrong by 2e-4 when their entries differ much in size.
    """
    wide = summing_dtype(rows.device)
    total = torch.zeros(rows.shape[0], others.shape[0], dtype=wide, device=rows.device)
    for p in parts(rows.shape[1], rows.device, width=rows.shape[0]):
        total += rows[:, p].to(wide) @ others[:, p].to(wide).T
    return to_numpy(add_up(total))


def comfortable(product: Tensor) -> float:
    """A power of two that brings the entries of a product (n,) near one, where squares are safe.

    It is 1 unless the largest entry is many decades away from one. To multiply by it changes no digit.
    """
    largest = max(float(abs(end)) for (part,) in chunks(product) for end in torch.aminmax(part))
    if largest == 0 or not math.isfinite(largest) or abs(math.log10(largest)) <= COMFORT[product.dtype]:
        return 1.0
    most = 1000 if product.dtype == torch.float64 else 120
    return 2.0 ** max(-most, min(most, -math.frexp(largest)[1]))


def check_finite(*values: float | np.ndarray) -> None:
    """Raise, on every rank in step, if a number that came out of a product is nan or infinite."""
    with together():
        if not all(np.isfinite(value).all() for value in values):
            raise CurvescopeError(
                "a product of the operator is not finite", hint="look for nan or inf in op @ v"
            )
