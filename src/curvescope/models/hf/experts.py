"""Experts of a transformers module: run in a form that has second derivatives, and what its routers choose.

Which experts a token goes to is a choice, constant almost everywhere; their weights are smooth functions of
the token and of the router. Curvature is that of a fixed choice, with weights that are differentiated or held
constant too (`routing="frozen"`): then no derivative goes through a router, and its own curvature is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from curvescope.core.errors import UsageError
from curvescope.models.model import Model
from curvescope.models.running.exchange import Change

Routing = Literal["differentiable", "frozen"]
IMPLEMENTATION = "_experts_implementation_internal"  # where a configuration keeps how experts are run
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
MIXTURE = "a mixture of"
WORDS = {
    "differentiable": "their weights are differentiated; routing='frozen' holds them constant too",
    "frozen": "their weights are held constant too (routing='frozen'), so that routers have no curvature",
}


def num_experts(config: Any) -> int:
    """How many experts a layer has, by its configuration; 0 for a model without."""
    return next((n for n in (getattr(config, name, 0) for name in COUNTS) if isinstance(n, int) and n), 0)


def plain_experts(module: Any) -> list[Change]:
    """Experts one after the other: grouped products do not take float64."""
    if not num_experts(module.config):
        return []
    parts: dict[int, Any] = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    configs = [vars(config) for config in parts.values() if IMPLEMENTATION in vars(config)]
    return [
        Change(config, IMPLEMENTATION, "eager") for config in configs if config[IMPLEMENTATION] != "eager"
    ]


@dataclass(frozen=True)
class Settings:
    """Changes of a transformers module that hold whenever it is called: its family's `own`, and experts'."""

    own: Callable[[Any], list[Change]]
    routing: Routing = "differentiable"

    def __call__(self, module: Any) -> list[Change]:
        held = held_routers(module) if self.routing == "frozen" else []
        return [*self.own(module), *plain_experts(module), *held]


def routers(module: nn.Module) -> list[nn.Module]:
    """The submodules that choose experts, where they are modules of their own."""
    return [part for part in module.modules() if type(part).__name__.endswith("Router")]


def held_routers(module: nn.Module) -> list[Change]:
    """Routers whose outputs are constants."""
    return [Change(vars(part), "forward", partial(_constant, part.forward)) for part in routers(module)]


def _constant(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        found = forward(*args, **options)
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in found)


def routing_note(config: Any, routing: Routing = "differentiable") -> str:
    """What a reader should know of the curvature of a mixture."""
    return (
        f"{MIXTURE} {num_experts(config)} experts: which of them a token goes to is constant, as it is at "
        f"these parameters; {WORDS[routing]}"
    )


def with_routing(model: Model, routing: str) -> Model:
    """The model with the weights of its experts differentiated or held constant."""
    if routing not in get_args(Routing):
        raise UsageError(f"expected routing 'differentiable' or 'frozen', got {routing!r}")
    if not isinstance(model.settings, Settings) or not routers(model.module):
        raise UsageError(
            f"expected a mixture of experts with routers that are known, {model.name!r} is none",
            hint="Mixtral, Qwen2-MoE and Qwen3-MoE of transformers are",
        )
    chosen: Routing = "frozen" if routing == "frozen" else "differentiable"
    config: Any = model.module.config
    said = [routing_note(config, one) for one in get_args(Routing)]
    notes = (*(note for note in model.notes if note not in said), routing_note(config, chosen))
    return replace(
        model,
        settings=replace(model.settings, routing=chosen),
        facts={**model.facts, "routing": chosen},
        notes=notes,
    )
