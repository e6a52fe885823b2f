"""Curvature of the loss in activations: in the stream, in heads' outputs, in the embeddings of an input.

The Hessian and the GGN of a problem's loss in the activations x at a point, the parameters held fixed.

    H = ∂²L/∂x²,    GGN = (1/N) Jᵀ (∂²ℓ/∂z²) J,  J = ∂z/∂x

x are the activations of all tokens of the data, or of some, and L the problem's own loss: divided once by the
number N of all its terms. Sequences do not interact, so H is block-diagonal over them; the tokens of a
sequence interact through attention.

Single tokens: the w × w diagonal blocks of an activation operator, all of them in one operator.

Tokens of different sequences do not interact, so one direction through the model serves all sequences of a
batch: a product with all blocks takes as many directions as there are positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.hessian_terms import MatrixName
from curvescope.core.operator import LinearOperator
from curvescope.data.batches import Batch
from curvescope.engines import Engine, EngineName
from curvescope.losses.custom import unsplit
from curvescope.operators.base import not_negative
from curvescope.problem import Problem, check_finite, differentiating

__all__ = ["ActivationGGN", "ActivationHessian", "ActivationOperator", "TokenBlocks"]


BYTES_AT_ONCE = 2**28  # of directions and results
Token = tuple[int, int]
"""A sequence of the data and a position in it."""
Tokens = int | Token | Sequence[int | Token] | None
"""A whole sequence, a token, some of these, or everything."""


@dataclass(frozen=True, eq=False)
class BatchPart:
    """The chosen activations of one batch, those of `tokens`, among the activations x of its sequences."""

    index: int  # of the batch
    rows: tuple[int, ...]  # sequences in the batch
    shape: tuple[int, ...]  # of their activations, (R, T, w), (R, w), …
    tokens: tuple[Token, ...]  # (sequence among the rows, position); empty where x has no positions
    names: tuple[Token, ...]  # the same tokens with the number of the sequence in the data

    @property
    def width(self) -> int:
        """w: numbers of one token."""
        return self.shape[-1]

    @property
    def size(self) -> int:
        """Entries of the vector."""
        return len(self.tokens) * self.width if self.tokens else torch.Size(self.shape).numel()

    @property
    def is_whole(self) -> bool:
        """Return True if all of x is chosen."""
        return self.size == torch.Size(self.shape).numel()

    def at_once(self, dtype: torch.dtype) -> int:
        """Directions whose copies, three of each, take a bounded memory."""
        column = torch.Size(self.shape).numel() * torch.finfo(dtype).bits // 8
        return max(1, BYTES_AT_ONCE // (3 * column))

    def batch(self, problem: Problem) -> Batch:
        """The sequences concerned, placed."""
        whole = problem.batches[self.index]
        if len(self.rows) < whole.num_sequences:
            chosen = torch.tensor(self.rows)
            whole = whole.map(lambda t: t[chosen.to(t.device)])
        return whole.map(problem.placed)

    def at(self) -> tuple[Any, ...]:
        """Index of the chosen tokens in (k, *shape); it gives (k, M, w)."""
        where = torch.tensor(self.tokens).T
        return slice(None), where[0], where[1]

    def scatter(self, V: Tensor) -> Tensor:
        """Return columns (n, k) of the part as activations (k, *shape), zero at other tokens."""
        if self.is_whole:
            return V.T.reshape(-1, *self.shape)
        activations = V.new_zeros(V.shape[1], *self.shape)
        activations[self.at()] = V.T.reshape(V.shape[1], len(self.tokens), self.width)
        return activations

    def gather(self, x: Tensor) -> Tensor:
        """Activations (k, *shape) as columns (n, k), a copy."""
        chosen = x if self.is_whole else x[self.at()]
        return chosen.reshape(len(x), -1).T.clone()


def find_parts(problem: Problem, at: str, tokens: Tokens) -> list[BatchPart]:
    """The chosen activations, batch by batch; those of no token are left out."""
    chosen = _as_tokens(problem, tokens)
    shapes: dict[Any, tuple[int, ...]] = {}
    parts, first = [], 0
    for index, batch in enumerate(problem.batches):
        numbers = range(first, first + batch.num_sequences)
        local = None if chosen is None else {n - first: p for n, p in chosen.items() if n in numbers}
        if local is None or local:
            parts.append(_part(problem, at, index, first, local, shapes))
        first += batch.num_sequences
    if len({part.shape[2:] if len(part.shape) > 2 else part.shape[1:] for part in parts}) > 1:
        raise UsageError(
            f"expected activations of one width at {at!r}, but the width differs between batches"
        )
    return parts


def _part(
    problem: Problem,
    at: str,
    index: int,
    first: int,
    own: dict[int, list[int] | None] | None,
    shapes: dict[Any, tuple[int, ...]],
) -> BatchPart:
    batch = problem.batches[index]
    rows = tuple(range(batch.num_sequences)) if own is None else tuple(sorted(own))
    kind = tuple(tuple(t.shape[1:]) for t in batch.tensors())
    if kind not in shapes:
        found = problem.activations(batch[:1].map(problem.placed), at)[at]
        if not found.is_floating_point():
            raise UsageError(f"expected real numbers at {at!r}, got {found.dtype}")
        shapes[kind] = found.shape[1:]
    shape = (len(rows), *shapes[kind])
    if len(shape) != 3:
        if own is not None and any(positions is not None for positions in own.values()):
            raise UsageError(
                f"expected activations (B, T, d) at {at!r} to choose tokens of, got {len(shape)} axes",
                hint="tokens=n takes all of sequence n",
            )
        return BatchPart(index, rows, shape, (), ())
    chosen = []
    for r, n in enumerate(rows):
        positions = None if own is None else own[n]
        chosen += [(r, t) for t in (range(shape[1]) if positions is None else sorted(positions))]
    bad = [t for _, t in chosen if not 0 <= t < shape[1]]
    if bad:
        raise UsageError(f"expected positions from 0 to {shape[1] - 1}, got {bad[0]}")
    return BatchPart(index, rows, shape, tuple(chosen), tuple((first + rows[r], t) for r, t in chosen))


def _as_tokens(problem: Problem, tokens: Any) -> dict[int, list[int] | None] | None:
    """Sequences with their chosen positions, None for all of them; None for all sequences."""
    if tokens is None:
        return None
    total = sum(batch.num_sequences for batch in problem.batches)
    given = [tokens] if isinstance(tokens, int) or _is_token(tokens) else list(tokens)
    whole = [item for item in given if isinstance(item, int)]
    pairs: list[Token] = [item for item in given if not isinstance(item, int) and _is_token(item)]
    twice = len(set(given)) < len(given) or any(n in whole for n, _ in pairs)
    if not given or len(whole) + len(pairs) < len(given) or twice:
        raise UsageError(
            f"expected different tokens as pairs (sequence, position), got {tokens!r}",
            hint="tokens=(0, 5), tokens=[(0, 5), (1, 2)], or tokens=0 for all of sequence 0",
        )
    positions: dict[int, list[int] | None] = dict.fromkeys(whole)
    positions |= {n: [t for m, t in pairs if m == n] for n, _ in pairs}
    bad = [n for n in positions if not 0 <= n < total]
    if bad:
        raise UsageError(f"expected sequences from 0 to {total - 1}, got {bad[0]}")
    return positions


def _is_token(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair)


class ActivationOperator(LinearOperator):
    """C = (1/N) Σ C_batch over the activations x at a point.

    A vector has the chosen tokens one after the other, by sequence and then by position, w entries each;
    where x has no positions, all of x, sequence by sequence.

    Args:
        problem: A `cs.Problem`.
        at: The point: `embed`, `L3.mid`, `L3.h1.out`, `final`, or any submodule;
            `models/capture/activation_points` lists them.
        tokens: (n, t) is token t of sequence n, and a number n the whole sequence; a list of these is
            their joint matrix. By default everything.
        engine: How products are executed; see docs/conventions.md.
        checkpoint: Recompute layers instead of storing them, except the one around the point.
        chunk: Number of columns at a time; by default chosen from the free memory.
        damping: λ of C + λ I.
    """

    symmetric = True
    name: MatrixName  # which matrix of the loss it is

    def __init__(
        self,
        problem: Problem,
        at: str,
        *,
        tokens: Tokens = None,
        engine: EngineName = "auto",
        checkpoint: bool = False,
        chunk: int | None = None,
        damping: float = 0.0,
    ):
        if not isinstance(problem, Problem):
            raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
        if not problem.loss.splits:
            raise unsplit(type(self).__name__)
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise UsageError(f"expected a chunk of at least 1 column, got {chunk!r}")
        self.problem, self.at, self.chunk, self.damping = problem, at, chunk, not_negative("damping", damping)
        self.engine = Engine(problem, engine, checkpoint=checkpoint)
        self.parts = find_parts(problem, at, tokens)
        n = sum(part.size for part in self.parts)
        self.shape, self.dtype, self.device = (n, n), problem.dtype, problem.device
        self.psd = self._psd()

    def _psd(self) -> bool:
        return False

    @property
    def tokens(self) -> list[Token]:
        """The (sequence, position) of every w entries of a vector; empty where x has no positions."""
        return [token for part in self.parts for token in part.names]

    @property
    def width(self) -> int:
        """w: entries of one token."""
        return self.parts[0].width

    def tokens_apart(self) -> TokenBlocks:
        """The same without what is between tokens: one w × w block for each."""
        return TokenBlocks(self)

    def values(self) -> Tensor:
        """The activations x themselves, as a vector."""

        def read(part: BatchPart) -> Tensor:
            return self.problem.activations(part.batch(self.problem), self.at)[self.at]

        return self._over_parts(read)

    def gradient(self) -> Tensor:
        """∂L/∂x, as a vector."""
        found = self.engine.consistent(lambda: self._over_parts(self._slope)) / self.problem.num_terms
        check_finite(found, self.problem)
        return found

    def _slope(self, part: BatchPart) -> Tensor:
        return self.engine.activation_gradient(part.batch(self.problem), self.at)

    def _over_parts(self, work: Callable[[BatchPart], Tensor]) -> Tensor:
        with differentiating():
            return torch.cat([part.gather(work(part)[None])[:, 0] for part in self.parts])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; raise at the end if they have changed."""
        with self.engine.frozen():
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        def parts() -> list[Tensor]:
            cut = V.split([part.size for part in self.parts])
            return [self._part_product(part, columns) for part, columns in zip(self.parts, cut, strict=True)]

        return self.divided(lambda: torch.cat(parts()), V)

    def divided(self, work: Callable[[], Tensor], V: Tensor) -> Tensor:
        """Divide the result of `work` on V by N, and add λ V."""
        total = self.engine.consistent(lambda: work().div_(self.problem.num_terms))
        check_finite(total, self.problem, V)
        return total.add_(V, alpha=self.damping) if self.damping else total

    def _part_product(self, part: BatchPart, V: Tensor) -> Tensor:
        step = self.chunk or part.at_once(self.dtype)
        products = [V[:, :0].clone()]
        for start in range(0, V.shape[1], step):
            tangents = part.scatter(V[:, start : start + step])
            products.append(part.gather(self.batch_product(part, tangents)))
        return torch.cat(products, dim=1)

    def batch_product(self, part: BatchPart, tangents: Tensor) -> Tensor:
        """The sum over the terms of a part's sequences, applied to tangents (k, *x.shape); not divided."""
        batch = part.batch(self.problem)
        return self.engine.in_activations(part.index, batch, self.name, self.at, tangents)


class ActivationHessian(ActivationOperator):
    """∂²L/∂x², by differentiating the gradient."""

    name = "hessian"


class ActivationGGN(ActivationOperator):
    """The GGN, positive semi-definite if the loss is convex in the outputs."""

    name = "ggn"

    def _psd(self) -> bool:
        return self.problem.loss.convex


class TokenBlocks(LinearOperator):
    """diag(C_11, C_22, …): the loss in the activations of each token alone, all others held fixed."""

    symmetric = True

    def __init__(self, whole: ActivationOperator):
        if not all(part.tokens for part in whole.parts):
            raise UsageError(
                f"expected activations (B, T, d) with positions, but {whole.at!r} has no positions"
            )
        self.whole, self.psd = whole, whole.psd
        self.shape, self.dtype, self.device = whole.shape, whole.dtype, whole.device

    @property
    def block_size(self) -> int:
        """w: every block is w × w."""
        return self.whole.width

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Products inside belong together."""
        with self.whole.frozen():
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        parts = self.whole.parts

        def product() -> Tensor:
            cut = V.split([part.size for part in parts])
            return torch.cat([self._part(part, columns) for part, columns in zip(parts, cut, strict=True)])

        return self.whole.divided(product, V)

    def _part(self, part: BatchPart, V: Tensor) -> Tensor:
        """One column after the other, some positions at a time."""
        out = torch.empty_like(V)
        positions = sorted({t for _, t in part.tokens})
        step = self.whole.chunk or part.at_once(self.dtype)
        rows, places = torch.tensor(part.tokens).T
        for start in range(0, len(positions), step):
            some = torch.tensor(positions[start : start + step])
            chosen = torch.isin(places, some).nonzero().flatten()
            at = torch.searchsorted(some, places[chosen]), rows[chosen], places[chosen]
            for j in range(V.shape[1]):
                tokens = V[:, j].view(len(part.tokens), part.width)
                tangents = V.new_zeros(len(some), *part.shape)
                tangents[at] = tokens[chosen]
                found = self.whole.batch_product(part, tangents)
                out[:, j].view(len(part.tokens), part.width)[chosen] = found[at]
        return out
