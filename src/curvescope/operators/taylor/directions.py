"""Directions in the space of parameters, as one vector; and the problem at θ + Σ tᵢ dᵢ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from curvescope.core.blocks import Block, ParamSpace
from curvescope.core.errors import ShapeError, UsageError, near_misses
from curvescope.core.seeds import probes
from curvescope.models.model import Model
from curvescope.models.parameter_selection import Params
from curvescope.problem import Problem

DirectionName = Literal["gradient", "random"]
DirectionInput = Tensor | Mapping[str, Tensor] | DirectionName
Point = Tensor | Mapping[str, Tensor] | Model | Problem
DESCRIPTIONS = {"gradient": "−∇L, steepest descent", "random": "a random direction of length one"}


class LossDirection(NamedTuple):
    """A vector over the chosen blocks, with its name for figures."""

    vector: Tensor  # (n,)
    name: str


def check_problem(problem: Any) -> None:
    """Raise unless the argument is a `cs.Problem`."""
    if not isinstance(problem, Problem):
        raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")


def as_direction(problem: Problem, given: Any, *blocks: Params, seed: int = 0) -> LossDirection:
    """Convert a description of a direction to a vector over `problem.space(*blocks)`.

    Args:
        given: A vector (n,) in the order of `problem.space(*blocks)`, which without blocks is the order of
            torch's `parameters_to_vector`. Or tensors by the names of parameters; other parameters stay
            fixed. Or "gradient" for −∇L, so that t is a learning rate; or "random" for a Gaussian direction
            of length one.
        seed: Seed of the random direction.
    """
    space = problem.space(*blocks)
    name = "given"
    if isinstance(given, str):
        if given not in get_args(DirectionName):
            words = list(get_args(DirectionName))
            raise UsageError(
                f"expected a vector, a dictionary of tensors, 'gradient' or 'random', got {given!r}",
                hint=near_misses(given, words),
            )
        name = DESCRIPTIONS[given]
        vector = -problem.gradient(*blocks) if given == "gradient" else _random(space, seed)
    elif isinstance(given, Mapping):
        vector = _gathered(problem, given, space)
    else:
        vector = _checked(given, space)
    return LossDirection(_check_usable(vector.detach(), "direction"), name)


def towards(problem: Problem, point: Any, *blocks: Params) -> LossDirection:
    """Direction d = θ' − θ to another point.

    Args:
        point: Parameters θ' by name, a vector over the blocks, a module, a model, or a problem at other
            parameters.
    """
    space, theta = problem.space(*blocks), parameter_vector(problem, *blocks)
    target = dict(point.named_parameters()) if isinstance(point, Model | Problem) else point
    target = dict(target.named_parameters()) if isinstance(target, nn.Module) else target
    if isinstance(target, Mapping):
        missing = [name for name in space.parameter_names if name not in target]
        if missing:
            raise UsageError(
                f"expected a point with all trained parameters, got one without {missing[0]!r}",
                hint="pass the blocks that it has, or its complete state",
            )
        point_vector = _gathered(problem, {name: target[name] for name in space.parameter_names}, space)
    else:
        point_vector = _checked(target, space)
    return LossDirection(
        _check_usable((point_vector - theta).detach(), "direction to the other point"), "to the other point"
    )


def displaced(problem: Problem, trees: Sequence[Mapping[str, Tensor]], t: Sequence[float]) -> Problem:
    """Return the problem at θ + Σ tᵢ dᵢ, for directions dᵢ by the names of parameters."""
    theta = dict(problem.named_parameters())
    point = {name: theta[name].detach() for tree in trees for name in tree}
    for tree, step in zip(trees, t, strict=True):
        for name, change in tree.items():
            point[name] = torch.add(point[name], change, alpha=float(step))
    return problem.at(point)


def filter_normalized(problem: Problem, vector: Tensor, *blocks: Params) -> Tensor:
    """Rescale every filter of a direction to the length of the parameters' filter: d ← d ‖θ_f‖ / ‖d_f‖.

    A filter f contains the weights of one output: a column of a matrix (inputs × outputs), or one index of
    the first axis of a larger tensor. Biases and gains do not change. (Li, Xu, Taylor, Studer and Goldstein,
    Visualizing the loss landscape of neural nets, 2018, arXiv 1712.09913, section 4, and their code.)
    """
    space, theta = problem.space(*blocks), parameter_vector(problem, *blocks)
    result = torch.empty_like(vector)
    for block in map(problem.model.inputs_first, space):
        entries, d, w = (space.view(x[:, None], block) for x in (result, vector, theta))
        scaled = _scaled(block, d.reshape(block.shape), w.reshape(block.shape))
        entries.copy_(scaled.reshape(entries.shape))
    return _check_usable(result, "filter-normalized direction")


def parameter_vector(problem: Problem, *blocks: Params) -> Tensor:
    """Parameters θ of the blocks as a vector (n,)."""
    space, parameters = problem.space(*blocks), dict(problem.named_parameters())
    return space.gather({name: parameters[name].detach() for name in space.parameter_names})


def dot(x: Tensor, y: Tensor) -> float:
    """x · y, in float64."""
    return float(x.double() @ y.double())


def _scaled(block: Block, d: Tensor, w: Tensor) -> Tensor:
    if len(block.shape) < 2:
        return torch.zeros_like(d)
    axes = (0,) if len(block.shape) == 2 else tuple(range(1, len(block.shape)))
    length = torch.linalg.vector_norm(d, dim=axes, keepdim=True)
    norms = torch.linalg.vector_norm(w, dim=axes, keepdim=True)
    return torch.where(length > 0, d * norms / length, torch.zeros_like(d))


def _random(space: ParamSpace, seed: int) -> Tensor:
    drawn = probes(space.size, 1, seed=seed, kind="gaussian", dtype=space.dtype, device=space.device)[:, 0]
    return drawn / torch.linalg.vector_norm(drawn.double()).to(drawn)


def _gathered(problem: Problem, tree: Mapping[str, Tensor], space: ParamSpace) -> Tensor:
    """Return the vector of tensors by name, each with its parameter's shape; raise if a parameter does not
    vary.
    """
    parameters = dict(problem.named_parameters())
    for name, value in tree.items():
        if name not in parameters:
            raise UsageError(f"the model has no parameter {name!r}", hint=near_misses(name, list(parameters)))
        if not isinstance(value, Tensor) or value.shape != parameters[name].shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"{name}: expected a tensor of {tuple(parameters[name].shape)}, got {got}")
    placed = {name: value.detach().to(space.device, space.dtype) for name, value in tree.items()}
    outside = [name for name in tree if name not in space.parameter_names]
    if outside:
        raise UsageError(
            f"expected trained parameters, got {outside[0]!r}",
            hint="pass its block after the direction, or omit it",
        )
    return space.gather(placed)


def _checked(given: Any, space: ParamSpace) -> Tensor:
    if not isinstance(given, Tensor) or given.shape != (space.size,):
        got = f"a tensor of {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ShapeError(
            f"expected a vector of {space.size} entries, got {got}",
            hint=space.hint,
        )
    return given.detach().to(space.device, space.dtype)


def _check_usable(vector: Tensor, what: str) -> Tensor:
    if not bool(torch.isfinite(vector).all()):
        raise UsageError(f"expected a {what} of finite numbers, got infinite or undefined entries")
    if not bool((vector != 0).any()):
        raise UsageError(f"expected a {what} that is not zero", hint="the loss does not change along zero")
    return vector
