"""Curvature of the loss in activations, such as the residual stream, heads' outputs or input embeddings.

Hessian and GGN of a problem's loss in the activations x at a point of the model, with fixed parameters:

    H = ∂²L/∂x²,    GGN = (1/N) Jᵀ (∂²ℓ/∂z²) J,  J = ∂z/∂x

x contains the activations of all tokens of the data, or of some. L is the problem's loss, divided once by the
number N of all its terms. Sequences do not interact, so H is block-diagonal over them; the tokens of a
sequence interact through attention.

`TokenBlocks` contains the w × w diagonal blocks of single tokens. Since tokens of different sequences do not
interact, one direction through the model serves all sequences of a batch: a product with all blocks takes as
many directions as there are positions.
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
from curvescope.operators.base import check_not_negative
from curvescope.problem import Problem, check_finite, differentiating

__all__ = ["ActivationGGN", "ActivationHessian", "ActivationOperator", "TokenBlocks"]


MAX_DIRECTION_BYTES = 2**28  # memory of directions and their results
Token = tuple[int, int]
"""A sequence of the data and a position in it."""
Tokens = int | Token | Sequence[int | Token] | None
"""A sequence, a token, a list of these, or None for all tokens."""


@dataclass(frozen=True, eq=False)
class BatchPart:
    """Chosen activations of one batch: those of `tokens`, among the activations x of its sequences."""

    index: int  # number of the batch
    rows: tuple[int, ...]  # sequences in the batch
    shape: tuple[int, ...]  # shape of their activations: (R, T, w), (R, w), …
    tokens: tuple[Token, ...]  # (sequence among the rows, position); empty if x has no positions
    names: tuple[Token, ...]  # the same tokens with the number of the sequence in the data

    @property
    def width(self) -> int:
        """Number w of entries of one token."""
        return self.shape[-1]

    @property
    def size(self) -> int:
        """Number of entries of the vector."""
        return len(self.tokens) * self.width if self.tokens else torch.Size(self.shape).numel()

    @property
    def is_whole(self) -> bool:
        """Return True if all activations of these sequences are chosen."""
        return self.size == torch.Size(self.shape).numel()

    def at_once(self, dtype: torch.dtype) -> int:
        """Number of directions for which three copies each fit into the memory limit."""
        column = torch.Size(self.shape).numel() * torch.finfo(dtype).bits // 8
        return max(1, MAX_DIRECTION_BYTES // (3 * column))

    def batch(self, problem: Problem) -> Batch:
        """The part's sequences, on the model's device."""
        batch = problem.batches[self.index]
        if len(self.rows) < batch.num_sequences:
            chosen = torch.tensor(self.rows)
            batch = batch.map(lambda t: t[chosen.to(t.device)])
        return batch.map(problem.placed)

    def at(self) -> tuple[Any, ...]:
        """Index of the chosen tokens in (k, *shape); it gives (k, M, w)."""
        positions = torch.tensor(self.tokens).T
        return slice(None), positions[0], positions[1]

    def scatter(self, V: Tensor) -> Tensor:
        """Return columns (n, k) of the part as activations (k, *shape), zero at other tokens."""
        if self.is_whole:
            return V.T.reshape(-1, *self.shape)
        activations = V.new_zeros(V.shape[1], *self.shape)
        activations[self.at()] = V.T.reshape(V.shape[1], len(self.tokens), self.width)
        return activations

    def gather(self, x: Tensor) -> Tensor:
        """Copy activations (k, *shape) to columns (n, k)."""
        chosen = x if self.is_whole else x[self.at()]
        return chosen.reshape(len(x), -1).T.clone()


def find_parts(problem: Problem, at: str, tokens: Tokens) -> list[BatchPart]:
    """Find the chosen activations, batch by batch, without batches that have none."""
    chosen = _as_tokens(problem, tokens)
    shapes: dict[Any, tuple[int, ...]] = {}
    parts, first_sequence = [], 0
    for index, batch in enumerate(problem.batches):
        numbers = range(first_sequence, first_sequence + batch.num_sequences)
        local = None if chosen is None else {n - first_sequence: p for n, p in chosen.items() if n in numbers}
        if local is None or local:
            parts.append(_part(problem, at, index, first_sequence, local, shapes))
        first_sequence += batch.num_sequences
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
    chosen_tokens: dict[int, list[int] | None] | None,
    shapes: dict[Any, tuple[int, ...]],
) -> BatchPart:
    batch = problem.batches[index]
    rows = tuple(range(batch.num_sequences)) if chosen_tokens is None else tuple(sorted(chosen_tokens))
    kind = tuple(tuple(t.shape[1:]) for t in batch.tensors())
    if kind not in shapes:
        activations = problem.activations(batch[:1].map(problem.placed), at)[at]
        if not activations.is_floating_point():
            raise UsageError(f"expected real numbers at {at!r}, got {activations.dtype}")
        shapes[kind] = activations.shape[1:]
    shape = (len(rows), *shapes[kind])
    if len(shape) != 3:
        if chosen_tokens is not None and any(positions is not None for positions in chosen_tokens.values()):
            raise UsageError(
                f"expected activations (B, T, d) at {at!r} to choose tokens of, got {len(shape)} axes",
                hint="tokens=n takes all of sequence n",
            )
        return BatchPart(index, rows, shape, (), ())
    chosen = []
    for r, n in enumerate(rows):
        positions = None if chosen_tokens is None else chosen_tokens[n]
        chosen += [(r, t) for t in (range(shape[1]) if positions is None else sorted(positions))]
    outside = [t for _, t in chosen if not 0 <= t < shape[1]]
    if outside:
        raise UsageError(f"expected positions from 0 to {shape[1] - 1}, got {outside[0]}")
    return BatchPart(index, rows, shape, tuple(chosen), tuple((first + rows[r], t) for r, t in chosen))


def _as_tokens(problem: Problem, tokens: Any) -> dict[int, list[int] | None] | None:
    """Chosen positions by sequence (None: all positions); None for all sequences."""
    if tokens is None:
        return None
    total = sum(batch.num_sequences for batch in problem.batches)
    items = [tokens] if isinstance(tokens, int) or _is_token(tokens) else list(tokens)
    whole_sequences = [item for item in items if isinstance(item, int)]
    pairs: list[Token] = [item for item in items if not isinstance(item, int) and _is_token(item)]
    has_repeats = len(set(items)) < len(items) or any(n in whole_sequences for n, _ in pairs)
    if not items or len(whole_sequences) + len(pairs) < len(items) or has_repeats:
        raise UsageError(
            f"expected different tokens as pairs (sequence, position), got {tokens!r}",
            hint="tokens=(0, 5), tokens=[(0, 5), (1, 2)], or tokens=0 for all of sequence 0",
        )
    positions: dict[int, list[int] | None] = dict.fromkeys(whole_sequences)
    positions |= {n: [t for m, t in pairs if m == n] for n, _ in pairs}
    outside = [n for n in positions if not 0 <= n < total]
    if outside:
        raise UsageError(f"expected sequences from 0 to {total - 1}, got {outside[0]}")
    return positions


def _is_token(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair)


class ActivationOperator(LinearOperator):
    """C = (1/N) Σ C_batch over the activations x at a point.

    A vector contains the chosen tokens one after the other, by sequence and then by position, w entries
    each. If x has no positions, it contains all of x, sequence by sequence.

    Args:
        problem: A `cs.Problem`.
        at: The point: `embed`, `L3.mid`, `L3.h1.out`, `final`, or any submodule;
            `models/capture/activation_points` lists them.
        tokens: A pair (n, t) means token t of sequence n, and a number n the whole sequence. A list of these
            gives their joint matrix. By default all tokens.
        engine: How products are executed; see docs/conventions.md.
        checkpoint: Recompute layers instead of storing them, except the one around the point.
        chunk: Number of columns at a time; by default chosen from the free memory.
        damping: λ of C + λ I.
    """

    symmetric = True
    name: MatrixName  # matrix of the loss

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
        if not problem.loss.has_outputs:
            raise unsplit(type(self).__name__)
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise UsageError(f"expected a chunk of at least 1 column, got {chunk!r}")
        self.problem, self.at, self.chunk, self.damping = (
            problem,
            at,
            chunk,
            check_not_negative("damping", damping),
        )
        self.engine = Engine(problem, engine, checkpoint=checkpoint)
        self.parts = find_parts(problem, at, tokens)
        n = sum(part.size for part in self.parts)
        self.shape, self.dtype, self.device = (n, n), problem.dtype, problem.device
        self.psd = self._psd()

    def _psd(self) -> bool:
        return False

    @property
    def tokens(self) -> list[Token]:
        """Pairs (sequence, position) for each w entries of a vector; empty if x has no positions."""
        return [token for part in self.parts for token in part.names]

    @property
    def width(self) -> int:
        """Number w of entries of one token."""
        return self.parts[0].width

    def token_blocks(self) -> TokenBlocks:
        """Return the operator without interactions between tokens: one w × w block for each token."""
        return TokenBlocks(self)

    def values(self) -> Tensor:
        """Return the activations x as a vector."""

        def read(part: BatchPart) -> Tensor:
            return self.problem.activations(part.batch(self.problem), self.at)[self.at]

        return self._over_parts(read)

    def gradient(self) -> Tensor:
        """Return ∂L/∂x as a vector."""
        gradient = (
            self.engine.consistent(lambda: self._over_parts(self._part_gradient)) / self.problem.num_terms
        )
        check_finite(gradient, self.problem)
        return gradient

    def _part_gradient(self, part: BatchPart) -> Tensor:
        return self.engine.activation_gradient(part.batch(self.problem), self.at)

    def _over_parts(self, function: Callable[[BatchPart], Tensor]) -> Tensor:
        with differentiating():
            return torch.cat([part.gather(function(part)[None])[:, 0] for part in self.parts])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; raise at the end if they have changed."""
        with self.engine.frozen():
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        def parts() -> list[Tensor]:
            cut = V.split([part.size for part in self.parts])
            return [
                self._product_on_part(part, columns) for part, columns in zip(self.parts, cut, strict=True)
            ]

        return self.divided(lambda: torch.cat(parts()), V)

    def divided(self, compute: Callable[[], Tensor], V: Tensor) -> Tensor:
        """Divide the result of `compute` for V by N, and add λ V."""
        total = self.engine.consistent(lambda: compute().div_(self.problem.num_terms))
        check_finite(total, self.problem, V)
        return total.add_(V, alpha=self.damping) if self.damping else total

    def _product_on_part(self, part: BatchPart, V: Tensor) -> Tensor:
        step = self.chunk or part.at_once(self.dtype)
        products = [V[:, :0].clone()]
        for start in range(0, V.shape[1], step):
            tangents = part.scatter(V[:, start : start + step])
            products.append(part.gather(self.batch_product(part, tangents)))
        return torch.cat(products, dim=1)

    def batch_product(self, part: BatchPart, tangents: Tensor) -> Tensor:
        """Apply the undivided sum over terms of a part's sequences to tangents (k, *x.shape)."""
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
    """diag(C_11, C_22, …): curvature in the activations of each token, with all others fixed."""

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
        """Size w of each w × w block."""
        return self.whole.width

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; raise at the end if they have changed."""
        with self.whole.frozen():
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        parts = self.whole.parts

        def product() -> Tensor:
            cut = V.split([part.size for part in parts])
            return torch.cat([self._part(part, columns) for part, columns in zip(parts, cut, strict=True)])

        return self.whole.divided(product, V)

    def _part(self, part: BatchPart, V: Tensor) -> Tensor:
        """Compute one column after the other, some positions at a time."""
        out = torch.empty_like(V)
        positions = sorted({t for _, t in part.tokens})
        step = self.whole.chunk or part.at_once(self.dtype)
        rows, token_positions = torch.tensor(part.tokens).T
        for start in range(0, len(positions), step):
            batch_positions = torch.tensor(positions[start : start + step])
            chosen = torch.isin(token_positions, batch_positions).nonzero().flatten()
            at = (
                torch.searchsorted(batch_positions, token_positions[chosen]),
                rows[chosen],
                token_positions[chosen],
            )
            for j in range(V.shape[1]):
                tokens = V[:, j].view(len(part.tokens), part.width)
                tangents = V.new_zeros(len(batch_positions), *part.shape)
                tangents[at] = tokens[chosen]
                product = self.whole.batch_product(part, tangents)
                out[:, j].view(len(part.tokens), part.width)[chosen] = product[at]
        return out
