"""The Hessian and the GGN of a problem's loss in the activations x at a point, the parameters held fixed.

    H = ∂²L/∂x²,    GGN = (1/N) Jᵀ (∂²ℓ/∂z²) J,  J = ∂z/∂x

x are the activations of all tokens of the data, or of some, and L the problem's own loss: divided once by
the number N of all its terms. Sequences do not meet, so H is block-diagonal over them; the tokens of a
sequence do, through attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.parts import MatrixName
from curvescope.engines import Engine, EngineName
from curvescope.losses.custom import unsplit
from curvescope.operators.activations.places import Part, Token, Tokens, find_parts
from curvescope.operators.activations.tokens import TokenBlocks
from curvescope.operators.shift import not_negative
from curvescope.problem import Problem, check_finite, differentiating


class ActivationOperator(LinearOperator):
    """C = (1/N) Σ C_batch over the activations x at a point.

    A vector has the chosen tokens one after the other, by sequence and then by position, w entries each;
    where x has no positions, all of x, sequence by sequence.

    Args:
        problem: A `cs.Problem`.
        at: The point: `embed`, `L3.mid`, `L3.h1.out`, `final`, or any submodule, see `models/capture/points`.
        tokens: (n, t) is token t of sequence n, and a number n the whole sequence; a list of these is
            their joint matrix. By default everything.
        engine: How products are executed; see docs/conventions.md.
        checkpoint: Whether layers are computed again instead of being kept; not the one around the point.
        chunk: Columns at a time, where the memory's own answer is not wanted.
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

        def read(part: Part) -> Tensor:
            return self.problem.activations(part.batch(self.problem), self.at)[self.at]

        return self._over_parts(read)

    def gradient(self) -> Tensor:
        """∂L/∂x, as a vector."""
        found = self.engine.consistent(lambda: self._over_parts(self._slope)) / self.problem.num_terms
        check_finite(found, self.problem)
        return found

    def _slope(self, part: Part) -> Tensor:
        return self.engine.activation_gradient(part.batch(self.problem), self.at)

    def _over_parts(self, work: Callable[[Part], Tensor]) -> Tensor:
        with differentiating():
            return torch.cat([part.gather(work(part)[None])[:, 0] for part in self.parts])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Products inside belong together: an error at the end if the model or the data have changed."""
        with self.engine.frozen():
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        def parts() -> list[Tensor]:
            cut = V.split([part.size for part in self.parts])
            return [self._part_product(part, own) for part, own in zip(self.parts, cut, strict=True)]

        return self.divided(lambda: torch.cat(parts()), V)

    def divided(self, work: Callable[[], Tensor], V: Tensor) -> Tensor:
        """What `work` makes of V by `batch_product`s, at the problem as it is, divided by N, and λ V."""
        total = self.engine.consistent(lambda: work().div_(self.problem.num_terms))
        check_finite(total, self.problem, V)
        return total.add_(V, alpha=self.damping) if self.damping else total

    def _part_product(self, part: Part, V: Tensor) -> Tensor:
        step = self.chunk or part.at_once(self.dtype)
        found = [V[:, :0].clone()]
        for start in range(0, V.shape[1], step):
            tangents = part.scatter(V[:, start : start + step])
            found.append(part.gather(self.batch_product(part, tangents)))
        return torch.cat(found, dim=1)

    def batch_product(self, part: Part, tangents: Tensor) -> Tensor:
        """The sum over the terms of a part's sequences, applied to tangents (k, *x.shape); not divided."""
        batch = part.batch(self.problem)
        return self.engine.in_activations(part.index, batch, self.name, self.at, tangents)


class ActivationHessian(ActivationOperator):
    """∂²L/∂x², by differentiating the gradient."""

    name = "hessian"


class ActivationGGN(ActivationOperator):
    """The GGN, positive semi-definite where the loss is convex in the outputs."""

    name = "ggn"

    def _psd(self) -> bool:
        return self.problem.loss.convex
