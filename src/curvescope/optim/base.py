"""Base class of this package's optimizers: torch.optim's interface, and the curvature of a step.

`opt.step(closure)` calls the closure, which returns the loss *with its graph*: no `zero_grad`, no `backward`.
The gradient and all products are derivatives of that loss, so one batch defines a step. `.grad` is neither
read nor written. Settings are in `param_groups`, everything else in `state`, so that `state_dict`,
`copy.deepcopy` and pickle save the complete optimizer.

Random estimates of a diagonal of curvature, from the loss of one step.

    hutchinson   z ⊙ (H z), z of random signs: its mean is diag H (Bekas et al., 2007)
    ggn          z ⊙ (G z), with the GGN; its mean has no negative entry
    bartlett     N ĝ ⊙ ĝ, ĝ the gradient of the mean loss of N terms at targets drawn from the model: its mean
                 is diag G for a log-likelihood whose terms weigh 0 or 1 (Liu et al., 2024, algorithm 2)

For a diagonal matrix the first two are exact with one vector z.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator, probes
from curvescope.core.tensors import custom_functions
from curvescope.kernels.function_mode import PlainAttention
from curvescope.optim.objective import (
    Closure,
    ClosureResult,
    StepObjective,
    refuse_wrong_functions,
    unflatten,
)

WORK = "work"
COUNTED = ("steps", "losses", "gradients", "products", "block_products")
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]
PRECISIONS = (torch.float32, torch.float64)


class CurvatureOptimizer(torch.optim.Optimizer, ABC):
    """Base class of optimizers that use the curvature of the closure's loss.

    `work` counts the cost of all steps so far. A loss is one forward pass, a gradient one backward pass. A
    product is a backward pass through the graph of the gradient, or passes through those of Jᵀu, the loss and
    Jᵀ. If the loss of a step does not depend on a parameter, the parameter does not change, as in
    torch.optim.
    """

    state_names: ClassVar[frozenset[str]]  # names of the entries in the state of a parameter
    added: ClassVar[frozenset[str]] = frozenset()  # settings that older states lack
    _compared: Collection[tuple[str, ...]] = (
        frozenset()
    )  # names of custom functions whose products were checked

    def __init__(self, params: Params, settings: dict[str, Any]):
        """Accept parameters as a list, as groups, or as a dictionary by name as in a `cs.Model`."""
        by_name = isinstance(params, Mapping) and all(isinstance(p, Tensor) for p in params.values())
        super().__init__(list(params.items()) if by_name else params, settings)  # pyright: ignore

    @property
    def work(self) -> dict[str, int]:
        """Numbers of steps, losses (forward passes), gradients and products with curvature so far.

        A block product is one with the Hessian of a single parameter.
        """
        counts = self.shared_state(WORK)
        return {name: int(counts.get(name, 0)) for name in COUNTED}

    def count(self, what: str, by: int = 1) -> None:
        """Add to `work`."""
        self.update_shared_state(WORK, **{**self.work, what: self.work[what] + by})

    def shared_state(self, name: str) -> dict[str, Any]:
        """Return the state of all parameters together; empty before it is set."""
        return self.state[name]  # pyright: ignore[reportArgumentType]

    def update_shared_state(self, name: str, **values: Any) -> None:
        """Store shared state in a new dictionary, because a loaded one may be in use elsewhere."""
        self.state[name] = {**self.shared_state(name), **values}  # pyright: ignore[reportArgumentType]

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return self.work["steps"]

    def trained(self) -> list[Tensor]:
        """Return the parameters that are not frozen, over all groups."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def groups_of(self, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the group of each parameter."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return [groups[id(p)] for p in parameters]

    def step(self, closure: Closure | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step.

        Args:
            closure: Returns the loss with its graph, (loss, outputs), an object with a `loss`, or a
                `cs.Problem`. An optimizer that compares losses calls it again with the random numbers that
                torch drew the first time; it must use the same batch then.

        Returns:
            The loss before the step.
        """
        if closure is None:
            raise UsageError(
                f"{type(self).__name__} needs a closure, whose loss it differentiates twice",
                hint="opt.step(lambda: loss_fn(model(x), y)), without backward",
            )
        parameters = self.trained()
        if not parameters:
            raise UsageError("all parameters of the optimizer are frozen")
        repeatable_closure = ClosureReplay(closure, parameters[0].device)
        with torch.enable_grad(), PlainAttention():  # plain attention has a second derivative
            self.count("losses")
            objective = StepObjective(repeatable_closure(), parameters, self.count)
            self._check_functions(objective, repeatable_closure)
        with torch.no_grad():
            self._move(objective, repeatable_closure)
        self.count("steps")
        return objective.loss.detach()

    def _check_functions(self, objective: StepObjective, closure: Closure) -> None:
        """Arrange that custom functions in a loss are checked by finite differences before their first
        product.
        """
        names = tuple(custom_functions(objective.loss))

        def check() -> None:
            refuse_wrong_functions(objective, closure, names)
            self._compared = {*self._compared, names}

        objective.check = check if names and names not in self._compared else None

    @abstractmethod
    def _move(self, objective: StepObjective, closure: Closure) -> None:
        """Update the parameters, given the loss of this step; called under no_grad."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group like torch.optim; parameters must be real, and share one precision and
        device.
        """
        super().add_param_group(param_group)
        parameters = [p for group in self.param_groups for p in group["params"]]
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) > 1 or parameters[0].dtype not in PRECISIONS:
            self.param_groups.pop()
            description = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ShapeError(
                f"expected parameters of one dtype, float32 or float64, on one device, got {description}",
                hint="lower precision loses the curvature: use model.float(), with autocast in the closure",
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of this class, like torch.optim."""
        settings = [self.defaults.keys() - group.keys() - self.added for group in state_dict["param_groups"]]
        states = [
            s.keys() - self.state_names for key, s in state_dict["state"].items() if isinstance(key, int)
        ]
        missing, foreign = sorted(set().union(*settings)), sorted(set().union(*states))
        if missing or foreign:
            difference = f"without {', '.join(missing)}" if missing else f"with {', '.join(foreign)}"
            raise UsageError(f"expected the state of a {type(self).__name__}, got one {difference}")
        super().load_state_dict(state_dict)

    def shared_setting(self, name: str) -> Any:
        """Return a setting shared by all parameters, from the first group."""
        return self.param_groups[0][name]


def check_settings(
    *, above: dict[str, float] | None = None, at_least: dict[str, float] | None = None
) -> None:
    """Raise unless numbers are above zero, or at least zero."""
    for name, value in (above or {}).items():
        if not value > 0:
            raise UsageError(f"expected {name} above 0, got {value!r}")
    for name, value in (at_least or {}).items():
        if not value >= 0:
            raise UsageError(f"expected {name} of at least 0, got {value!r}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise unless both betas are in [0, 1)."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"expected two betas in [0, 1), got {betas!r}")


@final
class ClosureReplay:
    """Closure whose second call repeats the draws of torch's generators in the first call. Batch norm
    updates its running statistics only in the first call. Random numbers of Python, NumPy and custom
    generators, and batches that the closure fetches, are not repeated.
    """

    def __init__(self, closure: Closure, device: torch.device):
        self._closure = closure
        self._generators = _generators(device)
        self._states: list[Tensor] | None = None

    def __call__(self) -> ClosureResult:
        now = [g.get_state() for g in self._generators]
        if self._states is None:
            self._states = now
            return self._closure()
        try:
            self._set(self._states)
            with kept_statistics():
                return self._closure()
        finally:
            self._set(now)

    def _set(self, states: list[Tensor]) -> None:
        for each, state in zip(self._generators, states, strict=True):
            each.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of a GPU."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        at = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[at])
    return generators


@contextmanager
def kept_statistics() -> Iterator[None]:
    """Restore the running statistics of every normalization layer called inside the context."""
    before: dict[int, tuple[Tensor, Tensor]] = {}

    def remember(module: nn.Module, _: Any) -> None:
        if isinstance(module, _NormBase) and module.training:
            before.update({id(b): (b, b.clone()) for b in module.buffers() if id(b) not in before})

    handle = register_module_forward_pre_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        for buffer, was in before.values():
            buffer.copy_(was)


Estimate = Literal["hutchinson", "ggn", "bartlett"]


def diagonal_of(
    objective: StepObjective, estimate: Estimate, *, num_probes: int, seed: int, step: int
) -> list[Tensor]:
    """Return the mean over draws that depend only on (seed, step); the graph of the gradient must exist."""
    draw = _bartlett if estimate == "bartlett" else partial(_signs, estimate)
    estimates = [draw(objective, seed, i) for i in range(step * num_probes, (step + 1) * num_probes)]
    return [torch.stack(parts).mean(0) for parts in zip(*estimates, strict=True)]


def _signs(estimate: Estimate, objective: StepObjective, seed: int, draw: int) -> list[Tensor]:
    parameters = objective.parameters
    n, first = sum(p.numel() for p in parameters), parameters[0]
    z = unflatten(
        probes(n, 1, seed=seed, first=draw, dtype=first.dtype, device=first.device)[:, 0], parameters
    )
    image = objective.product(z, "ggn" if estimate == "ggn" else "hessian")
    return [a * b for a, b in zip(z, image, strict=True)]


def _bartlett(objective: StepObjective, seed: int, draw: int) -> list[Tensor]:
    problem = objective.problem
    if problem is None:
        raise UsageError(
            "estimate='bartlett' draws targets from the model, so it needs the loss and its terms",
            hint="return a cs.Problem from the closure, or use estimate='ggn'",
        )
    with torch.enable_grad():
        sums = []
        for i, (z, batch) in enumerate(zip(objective.outputs, problem.placed_batches("draws"), strict=True)):
            targets = problem.loss.sample_targets(z.detach(), batch.targets, generator(seed, draw, i))
            sums.append(problem.loss.sum(z, targets, batch.weights))
        loss = torch.stack(sums).sum() / problem.num_terms
    return [g.square() * problem.num_terms for g in objective.drawn_gradient(loss)]
