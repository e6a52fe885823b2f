"""Blocks of a Hessian as sums of small factored terms, so that a block need not be formed.

A block is a four-index array H[a, c, b, e]: (a, c) is an entry of the first weight, (b, e) one of the
second. Every block of an attention layer is a sum over queries n of products of vectors and small
matrices, for instance x_n[a] x_n[b] C_n[c, e] for the queries' own block. `Term` holds the factors of
such a sum and knows its dense form, its product with a matrix, its diagonal, trace and inner products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

ROW, COLUMN = "ac", "be"
MAX_ENTRIES = 1 << 24  # of one intermediate tensor
_SWAP = str.maketrans("acbe", "beac")
_MERGE = str.maketrans("be", "ac")


@dataclass(frozen=True)
class Term:
    """T[a, c, b, e] = Σ_n left_n · right_n · core_n, each factor carrying some of the four indices.

    `on_left` says which of the row's indices the vectors `left` carry ("a", "c" or both), `on_right` the
    same for the column's ("b", "e" or both). `core` carries the indices that are left, in the order a, c,
    b, e, behind an axis n; a core that is the same for all n has no such axis and is `shared`. With
    `half` it is a product: core (n, v, row's) and half (n, v, column's), summed over v. An absent factor
    is the number one.
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
    def T(self) -> Term:
        """The same term with rows and columns exchanged: T[b, e, a, c]."""
        core, half = self.core, self.half
        if half is not None:
            core, half = half, core
        elif core is not None:
            start = 0 if self.shared else 1
            middle = start + len(self.rows)
            core = core.permute(*range(start), *range(middle, core.dim()), *range(start, middle))
        return Term(
            self.right,
            self.left,
            core,
            self.on_right.translate(_SWAP),
            self.on_left.translate(_SWAP),
            half,
            self.shared,
        )

    def joined(self, other: Term) -> Term | None:
        """The sum of two terms as one, where they have the same vectors."""
        if self.left is not other.left or self.right is not other.right or self.shared != other.shared:
            return None
        one, two = self.explicit(), other.explicit()
        same = (one.on_left, one.on_right) == (two.on_left, two.on_right)
        if not same or one.core is None or two.core is None:
            return None
        return replace(one, core=one.core + two.core)

    def explicit(self) -> Term:
        """The same term with its core multiplied out."""
        if self.half is None or self.core is None:
            return self
        factors = [(self.core, "nv" + self.rows), (self.half, "nv" + self.columns)]
        return replace(self, core=_einsum(factors, "n" + self.rows + self.columns), half=None)

    def to_dense(self) -> Tensor:
        """All entries: (a, c, b, e), as a view of the product of the vectors' part and the core's.

        The smaller of the two is the left factor of that product, which is the fast way round.
        """
        term, vectors, rest = self.explicit(), self.on_left + self.on_right, self.rows + self.columns
        width = prod(f[0].numel() for f in (self.left, self.right) if f is not None)
        swap = term.core is not None and term.core.numel() < width * (1 if self.shared else term.count)
        made = rest + vectors if swap else vectors + rest
        return term._contract(made).permute([made.index(i) for i in ROW + COLUMN])

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

    def inner(self, other: Term) -> Tensor:
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
        if self.half is not None:  # over v first, and over what no other factor carries
            kept = "".join(i for i in dict.fromkeys(core[0][1] + core[1][1]) if i in left + right + out)
            core = [(_einsum(core, kept), kept)]
        return _einsum([(self.left, left), (self.right, right), *core], out)

    def _slices(self, step: int) -> Iterator[Term]:
        for start in range(0, self.count, step):
            cut = slice(start, start + step)
            core = self.core if self.core is None or self.shared else self.core[cut]
            left = None if self.left is None else self.left[cut]
            right = None if self.right is None else self.right[cut]
            yield replace(self, left=left, right=right, core=core)


def dense_sum(terms: Sequence[Term]) -> Tensor:
    """All entries of a sum of at least one term; cores behind the same vectors are added before that."""
    merged: list[Term] = []
    for term in terms:
        joined = merged[-1].joined(term) if merged else None
        merged[-1:] = [joined] if joined else [*merged[-1:], term]
    total, *others = (term.to_dense() for term in merged)
    for other in others:
        total += other
    return total


def frobenius_squared(terms: Sequence[Term], like: Tensor) -> Tensor:
    """Squared Frobenius norm of a sum of terms, no block formed; zero for no terms."""
    total = like.new_zeros(())
    for i, term in enumerate(terms):
        total = total + term.inner(term)
        for other in terms[i + 1 :]:
            total = total + 2 * term.inner(other)
    return total


def _einsum(operands: Sequence[tuple[Tensor | None, str]], out: str) -> Tensor:
    """`torch.einsum` of (tensor, indices) pairs, contracted from left to right; absent ones are skipped.

    Pair by pair, because with opt_einsum installed torch would look for its own order every time.
    """
    present = [(tensor, on) for tensor, on in operands if tensor is not None]
    made = present[0][0]
    if len(present) == 1:
        return torch.einsum(f"{present[0][1]}->{out}", made)
    equations = _pairwise(tuple(on for _, on in present), out)
    for (tensor, _), equation in zip(present[1:], equations, strict=True):
        made = torch.einsum(equation, made, tensor)
    return made


@cache
def _pairwise(indices: tuple[str, ...], out: str) -> tuple[str, ...]:
    """The equations of a product of factors, each with the next; an index stays while it is needed."""
    on, equations = indices[0], []
    for number, new in enumerate(indices[1:], 2):
        wanted = out + "".join(indices[number:])
        kept = out if number == len(indices) else "".join(i for i in dict.fromkeys(on + new) if i in wanted)
        equations.append(f"{on},{new}->{kept}")
        on = kept
    return tuple(equations)


def _inner(one: Term, two: Term) -> Tensor:
    """⟨one, two⟩: vectors on the same index meet in a Gram matrix, others meet the other term's core.

    Summands of `one` are numbered n, those of `two` m; what is left of both cores is multiplied last.
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
    kept = "".join(i for i in "nm" if i in core[1] + other[1])
    cores = _einsum([core, other], kept) if core[0] is not None or other[0] is not None else None
    return _einsum([(weights, "nm"), (cores, kept)], "")


def _absorb(core: tuple[Tensor | None, str], vectors: tuple[Tensor | None, str]) -> tuple[Tensor | None, str]:
    """Contract a core with the other term's vectors over the indices they share."""
    if vectors[0] is None:
        return core
    left = "".join(
        i for i in dict.fromkeys(core[1] + vectors[1]) if i in "nm" or not (i in core[1] and i in vectors[1])
    )
    return _einsum([core, vectors], left), left
