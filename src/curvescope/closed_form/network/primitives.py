"""A network at a point, as a list of maps whose first two derivatives are known in closed form.

A primitive is x₊ = f(x; θ) at given x and θ, with J = ∂f/∂(x, θ) and K(g) = ∇²⟨g, f⟩ over (x, θ). A tape is a
list of primitives, each applied to the output of the previous one, with skip connections: v_{t+1} = f_t(v_t;
θ_t) + c v_skip. It computes tangents, cotangents and second-order products. Functions with dense matrices is
in `curvescope.closed_form.network.stack`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import INPUT, Pair

Tree = Mapping[str, Tensor]
"""Tensors by parameter name; a name that is missing counts as zero."""


class Primitive(ABC):
    """One map x ↦ f(x; θ) at a point.

    `label` is its name among the sources of curvature. `parameters` are the parameters that it reads, by
    their names in the network: `prefix` and a role, such as `L0.` and `W_Q`. Trees that it returns have
    some of those names.
    """

    label: str
    prefix: str = ""
    x: Tensor
    output: Tensor
    parameters: dict[str, Tensor]

    @abstractmethod
    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        """J_x dx + J_θ dθ, in the shape of the output."""

    @abstractmethod
    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """J_xᵀ g and J_θᵀ g."""

    @abstractmethod
    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """K(g) (dx, dθ): its part in x and its part in θ."""

    @abstractmethod
    def jacobian(self) -> dict[str, Tensor]:
        """J by input ("x" or a parameter): (entries of the output, of the input). Small sizes only."""

    @abstractmethod
    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        """K(g) by source, then by pair of inputs, each pair once. Small sizes only."""

    def local(self, tree: Tree) -> dict[str, Tensor]:
        """Return the entries of `tree` for the parameters, by role; zeros for missing entries."""
        return {
            name.removeprefix(self.prefix): tree[name] if name in tree else torch.zeros_like(p)
            for name, p in self.parameters.items()
        }

    def named(self, tree: Tree) -> dict[str, Tensor]:
        """Return the entries of a tree by role under their full names, without absent parameters."""
        full_names = {self.prefix + role: value for role, value in tree.items()}
        return {name: value for name, value in full_names.items() if name in self.parameters}

    def name(self, role: str) -> str:
        """Return the full name of a role; the input keeps its name."""
        return role if role == INPUT else self.prefix + role


@dataclass(frozen=True)
class TapeStep:
    """A primitive, and the variable that is added to its output, times `scale`."""

    primitive: Primitive
    skip: int | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Tape:
    """v_{t+1} = f_t(v_t; θ_t) + scale_t v_{skip_t} for t = 0, …, n − 1. Variable t is the input of step t."""

    steps: tuple[TapeStep, ...]
    output: Tensor

    @property
    def input(self) -> Tensor:
        """v_0."""
        return self.steps[0].primitive.x

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All parameters, in the order of their first use."""
        return {name: p for step in self.steps for name, p in step.primitive.parameters.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of the input and of each parameter."""
        return {INPUT: self.input.numel()} | {name: p.numel() for name, p in self.parameters.items()}

    def tangents(self, dx: Tensor, dtheta: Tree) -> list[Tensor]:
        """Return dv_0, …, dv_n in the direction (dx, dθ)."""
        tangents = [dx]
        for step in self.steps:
            dv = step.primitive.jvp(tangents[-1], dtheta)
            tangents.append(dv if step.skip is None else dv + step.scale * tangents[step.skip])
        return tangents

    def cotangents(self, g: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return ∂ℓ/∂v_0, …, ∂ℓ/∂v_n and ∂ℓ/∂θ, given g = ∂ℓ/∂v_n."""
        return self._sweep(g, lambda t, g: self.steps[t].primitive.vjp(g))

    def second_order(
        self,
        cotangents: list[Tensor],
        tangents: list[Tensor],
        dtheta: Tree,
        dg: Tensor,
        *,
        curved: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return derivatives of the cotangents in the direction of the tangents, given dg = d(∂ℓ/∂v_n).

        Backwards, dg ← J_xᵀ dg + K_xx dx + K_xθ dθ and h_θ = J_θᵀ dg + K_θx dx + K_θθ dθ, K taken with the
        cotangent of the step's output. `curved=False` drops K, which gives products with the GGN.

        Returns:
            The part in the input, and the part in the parameters.
        """

        def pull(t: int, dg: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            primitive = self.steps[t].primitive
            dx, tree = primitive.vjp(dg)
            if not curved:
                return dx, tree
            more, bent = primitive.curve(cotangents[t + 1], tangents[t], dtheta)
            return dx + more, add_trees(tree, bent)

        cotangent_tangents, tree = self._sweep(dg, pull)
        return cotangent_tangents[0], tree

    def _sweep(
        self, last: Tensor, pull: Callable[[int, Tensor], tuple[Tensor, dict[str, Tensor]]]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run a linear map backwards over the steps, summing over all uses of a variable."""
        cotangents: list[Tensor | None] = [None] * len(self.steps) + [last]
        tree: dict[str, Tensor] = {}
        for t in reversed(range(len(self.steps))):
            g = _filled(cotangents[t + 1])
            back, more = pull(t, g)
            cotangents[t] = _sum(cotangents[t], back)
            skip = self.steps[t].skip
            if skip is not None:
                cotangents[skip] = _sum(cotangents[skip], self.steps[t].scale * g)
            tree = add_trees(tree, more)
        return [_filled(g) for g in cotangents], tree


@dataclass
class TapeRecorder:
    """Builder of a tape: `recorder = TapeRecorder(x)`, then `recorder.apply(…)` once for each primitive."""

    x: Tensor
    _steps: list[TapeStep] = field(default_factory=list)
    _variables: list[Tensor] = field(default_factory=list)

    @property
    def now(self) -> int:
        """Number of the variable that the next primitive reads; a skip connection starts there."""
        return len(self._steps)

    def apply(
        self, make: Callable[[Tensor], Primitive], *, skip: int | None = None, scale: float = 1.0
    ) -> None:
        """Append make(v_t), and add scale · v_skip to its output."""
        primitive = make(self.x)
        self._steps.append(TapeStep(primitive, skip, scale))
        self._variables.append(self.x)
        self.x = primitive.output if skip is None else primitive.output + scale * self._variables[skip]

    def tape(self) -> Tape:
        """Return the recorded steps."""
        return Tape(tuple(self._steps), self.x)


def add_trees(a: dict[str, Tensor], b: Tree) -> dict[str, Tensor]:
    """Return a + b, entry by entry, over the names of both."""
    return a | {name: a[name] + value if name in a else value for name, value in b.items()}


def rows(u: Tensor) -> Tensor:
    """Reshape tokens (…, d) to rows: (all tokens, d)."""
    return u.reshape(-1, u.shape[-1])


def choose(params: Tree, prefix: str, roles: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the existing parameters prefix + role, by their full names."""
    return {prefix + role: params[prefix + role] for role in roles if prefix + role in params}


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _filled(g: Tensor | None) -> Tensor:
    assert g is not None
    return g
