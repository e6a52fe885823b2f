"""Which activations a vector is over: all at a point, those of some sequences, or those of some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch
from curvescope.problem import Problem

BYTES_AT_ONCE = 2**28  # of directions and results
Token = tuple[int, int]
"""A sequence of the data and a position in it."""
Tokens = int | Token | Sequence[int | Token] | None
"""A whole sequence, a token, some of these, or everything."""


@dataclass(frozen=True, eq=False)
class Part:
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
        """Whether all of x is chosen."""
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
        """Where the chosen tokens are in (k, *shape): an index that gives (k, M, w)."""
        where = torch.tensor(self.tokens).T
        return slice(None), where[0], where[1]

    def scatter(self, V: Tensor) -> Tensor:
        """Columns (n, k) of the part as activations (k, *shape), zero where nothing was chosen."""
        if self.is_whole:
            return V.T.reshape(-1, *self.shape)
        found = V.new_zeros(V.shape[1], *self.shape)
        found[self.at()] = V.T.reshape(V.shape[1], len(self.tokens), self.width)
        return found

    def gather(self, x: Tensor) -> Tensor:
        """Activations (k, *shape) as columns (n, k), a copy."""
        chosen = x if self.is_whole else x[self.at()]
        return chosen.reshape(len(x), -1).T.clone()


def find_parts(problem: Problem, at: str, tokens: Tokens) -> list[Part]:
    """The chosen activations, batch by batch; those of no token are left out."""
    wanted = _as_tokens(problem, tokens)
    shapes: dict[Any, tuple[int, ...]] = {}
    found, first = [], 0
    for index, batch in enumerate(problem.batches):
        here = range(first, first + batch.num_sequences)
        own = None if wanted is None else {n - first: p for n, p in wanted.items() if n in here}
        if own is None or own:
            found.append(_part(problem, at, index, first, own, shapes))
        first += batch.num_sequences
    if len({part.shape[2:] if len(part.shape) > 2 else part.shape[1:] for part in found}) > 1:
        raise UsageError(f"expected activations of one width at {at!r}, they differ from batch to batch")
    return found


def _part(
    problem: Problem,
    at: str,
    index: int,
    first: int,
    own: dict[int, list[int] | None] | None,
    shapes: dict[Any, tuple[int, ...]],
) -> Part:
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
        return Part(index, rows, shape, (), ())
    chosen = []
    for r, n in enumerate(rows):
        positions = None if own is None else own[n]
        chosen += [(r, t) for t in (range(shape[1]) if positions is None else sorted(positions))]
    bad = [t for _, t in chosen if not 0 <= t < shape[1]]
    if bad:
        raise UsageError(f"expected positions from 0 to {shape[1] - 1}, got {bad[0]}")
    return Part(index, rows, shape, tuple(chosen), tuple((first + rows[r], t) for r, t in chosen))


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
    found: dict[int, list[int] | None] = dict.fromkeys(whole)
    found |= {n: [t for m, t in pairs if m == n] for n, _ in pairs}
    bad = [n for n in found if not 0 <= n < total]
    if bad:
        raise UsageError(f"expected sequences from 0 to {total - 1}, got {bad[0]}")
    return found


def _is_token(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair)
