"""Blocks of a Hessian as sums of small factored terms, to avoid forming blocks.

A block is a four-index array H[a, c, b, e]: (a, c) is an entry of the first weight, (b, e) one of the
second. Every block of an attention layer is a sum over queries n of products of vectors and small
matrices, for instance x_n[a] x_n[b] C_n[c, e] for the queries' own block. `FactoredTerm` holds the factors of
such a sum and computes its dense form, products with matrices, diagonal, trace and inner products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

ROW, COLUMN = "ac", "be"
MAX_ENTRIES = 1 << 24  # entries of one intermediate tensor
_SWAP = str.maketrans("acbe", "beac")
_MERGE = str.maketrans("be", "ac")


@dataclass(frozen=True)
class FactoredTerm:
    """T[a, c, b, e] = Σ_n left_n · right_n · core_n, each factor carrying some of the four indices.

    `on_left` are the row indices of the vectors `left` ("a", "c" or both), and `on_right` the column indices
    of `right` ("b", "e" or both). `core` has the other indices, in the order a, c, b, e, after an axis n. A
    `shared` core is the same for all n and has no such axis. With `half` the core is a product summed over v:
    core (n, v, row's) and half (n, v, column's). An absent factor is the number one.
    """

    left: Tensor | None
    right: Tensor | None
    core: Tensor | None
    on_left: str
    on_right: str
    half: Tensor | None = None
    shared: bool = False

    @property
    def rows(self) -> str:
        """The row's indices that are on the core."""
        return "".join(i for i in ROW if i not in self.on_left)

    @property
    def columns(self) -> str:
        """The column's indices that are on the core."""
        return "".join(i for i in COLUMN if i not in self.on_right)

    @property
    def T(self) -> FactoredTerm:
        """The same term with rows and columns exchanged: T[b, e, a, c]."""
        core, half = self.core, self.half
        if half is not None:
            core, half = half, core
        elif core is not None:
            start = 0 if self.shared else 1
            middle = start + len(self.rows)
            core = core.permute(*range(start), *range(middle, core.dim()), *range(start, middle))
        return FactoredTerm(
            self.right,
            self.left,
            core,
            self.on_right.translate(_SWAP),
            self.on_left.translate(_SWAP),
            half,
            self.shared,
        )

    def joined(self, other: FactoredTerm) -> FactoredTerm | None:
        """Return the sum of two terms as one term if they have the same vectors, else None."""
        if self.left is not other.left or self.right is not other.right or self.shared != other.shared:
            return None
        one, two = self.explicit(), other.explicit()
        same = (one.on_left, one.on_right) == (two.on_left, two.on_right)
        if not same or one.core is None or two.core is None:
            return None
        return replace(one, core=one.core + two.core)

    def explicit(self) -> FactoredTerm:
        """Return the same term with its core multiplied out."""
        if self.half is None or self.core is None:
            return self
        factors = [(self.core, "nv" + self.rows), (self.half, "nv" + self.columns)]
        return replace(self, core=_einsum(factors, "n" + self.rows + self.columns), half=None)

    def to_dense(self) -> Tensor:
        """All entries: (a, c, b, e), as a view of the product of the vectors' part and the core's.

        The smaller of the two is the left factor of that product, which is faster.
        """
        term, vectors, rest = self.explicit(), self.on_left + self.on_right, self.rows + self.columns
        width = prod(f[0].numel() for f in (self.left, self.right) if f is not None)
        swap = term.core is not None and term.core.numel() < width * (1 if self.shared else term.count)
        order = rest + vectors if swap else vectors + rest
        return term._contract(order).permute([order.index(i) for i in ROW + COLUMN])

    def matvec(self, V: Tensor) -> Tensor:
        """Σ_be T[a, c, b, e] V[b, e], as a matrix (a, c)."""
        core = self._core_factors()
        operands = [
            (V, COLUMN),
            (self.right, "n" + self.on_right),
            *core[::-1],
            (self.left, "n" + self.on_left),
        ]
        return _einsum(operands, ROW)

    def diagonal(self) -> Tensor:
        """T[a, c, a, c] as a matrix (a, c); needs weights of the same shape."""
        return self._contract(ROW, merge=True)

    def trace(self) -> Tensor:
        """Σ_ac T[a, c, a, c]."""
        return self._contract("", merge=True)

    def inner(self, other: FactoredTerm) -> Tensor:
        """Frobenius inner product ⟨self, other⟩ through Gram matrices over n, in slices of n."""
        one, two = self.explicit(), other.explicit()
        same = one.on_left == two.on_left and one.on_right == two.on_right
        width = 1 if same or one.core is None else prod(one.core.shape)
        width = width if same or one.shared else width // one.count
        step = max(1, MAX_ENTRIES // (two.count * width))
        return torch.stack([_inner(part, two) for part in one._slices(step)]).sum()

    @property
    def count(self) -> int:
        """Number of summands."""
        return next(f.shape[0] for f in (self.left, self.right, self.core) if f is not None)

    def _core_factors(self) -> list[tuple[Tensor | None, str]]:
        if self.half is not None:
            return [(self.core, "nv" + self.rows), (self.half, "nv" + self.columns)]
        return [(self.core, ("" if self.shared else "n") + self.rows + self.columns)]

    def _contract(self, out: str, *, merge: bool = False) -> Tensor:
        """Sum the factors into indices `out`; with `merge`, the column's indices are the row's."""
        table = _MERGE if merge else {}
        left, right = "n" + self.on_left, "n" + self.on_right.translate(table)
        core = [(factor, on.translate(table)) for factor, on in self._core_factors()]
        if self.half is not None:  # sum first over v and over indices of no other factor
            remaining = "".join(i for i in dict.fromkeys(core[0][1] + core[1][1]) if i in left + right + out)
            core = [(_einsum(core, remaining), remaining)]
        return _einsum([(self.left, left), (self.right, right), *core], out)

    def _slices(self, step: int) -> Iterator[FactoredTerm]:
        for start in range(0, self.count, step):
            cut = slice(start, start + step)
            core = self.core if self.core is None or self.shared else self.core[cut]
            left = None if self.left is None else self.left[cut]
            right = None if self.right is None else self.right[cut]
            yield replace(self, left=left, right=right, core=core)


def dense_sum(terms: Sequence[FactoredTerm]) -> Tensor:
    """Return all entries of a sum of at least one term; terms with the same vectors are added first."""
    merged: list[FactoredTerm] = []
    for term in terms:
        joined = merged[-1].joined(term) if merged else None
        merged[-1:] = [joined] if joined else [*merged[-1:], term]
    total, *others = (term.to_dense() for term in merged)
    for other in others:
        total += other
    return total


def frobenius_squared(terms: Sequence[FactoredTerm], like: Tensor) -> Tensor:
    """Return the squared Frobenius norm of a sum of terms without forming a block; zero for no terms."""
    total = like.new_zeros(())
    for i, term in enumerate(terms):
        total = total + term.inner(term)
        for other in terms[i + 1 :]:
            total = total + 2 * term.inner(other)
    return total


def _einsum(operands: Sequence[tuple[Tensor | None, str]], out: str) -> Tensor:
    """Return `torch.einsum` of (tensor, indices) pairs, contracted from left to right; skip absent tensors.

    The function contracts pair by pair, because torch with opt_einsum would search for an order every time.
    """
    present = [(tensor, on) for tensor, on in operands if tensor is not None]
    product = present[0][0]
    if len(present) == 1:
        return torch.einsum(f"{present[0][1]}->{out}", product)
    equations = _pairwise(tuple(on for _, on in present), out)
    for (tensor, _), equation in zip(present[1:], equations, strict=True):
        product = torch.einsum(equation, product, tensor)
    return product


@cache
def _pairwise(indices: tuple[str, ...], out: str) -> tuple[str, ...]:
    """Return the einsum equations that multiply factors one by one; an index stays while it is needed."""
    on, equations = indices[0], []
    for number, new in enumerate(indices[1:], 2):
        needed = out + "".join(indices[number:])
        remaining = (
            out if number == len(indices) else "".join(i for i in dict.fromkeys(on + new) if i in needed)
        )
        equations.append(f"{on},{new}->{remaining}")
        on = remaining
    return tuple(equations)


def _inner(one: FactoredTerm, two: FactoredTerm) -> Tensor:
    """Return ⟨one, two⟩. Vectors on the same index form a Gram matrix, others contract the other core.

    Summands of `one` are numbered n, those of `two` m. The remaining cores are multiplied last.
    """
    core = one.core, ("" if one.shared else "n") + one.rows + one.columns
    other = two.core, ("" if two.shared else "m") + two.rows + two.columns
    weights: Tensor | None = None
    for v, on_v, w, on_w in (
        (one.left, one.on_left, two.left, two.on_left),
        (one.right, one.on_right, two.right, two.on_right),
    ):
        if on_v != on_w:
            core = _absorb(core, (w, "m" + on_w))
            other = _absorb(other, (v, "n" + on_v))
        elif v is not None and w is not None:
            gram = v.flatten(1) @ w.flatten(1).T
            weights = gram if weights is None else weights * gram
    remaining = "".join(i for i in "nm" if i in core[1] + other[1])
    cores = _einsum([core, other], remaining) if core[0] is not None or other[0] is not None else None
    return _einsum([(weights, "nm"), (cores, remaining)], "")


def _absorb(core: tuple[Tensor | None, str], vectors: tuple[Tensor | None, str]) -> tuple[Tensor | None, str]:
    """Contract a core with the other term's vectors over the indices they share."""
    if vectors[0] is None:
        return core
    left = "".join(
        i for i in dict.fromkeys(core[1] + vectors[1]) if i in "nm" or not (i in core[1] and i in vectors[1])
    )
    return _einsum([core, vectors], left), left
