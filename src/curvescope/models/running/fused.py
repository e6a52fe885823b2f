"""A model with our kernels inside: the same function, with faster second derivatives.

Each stand-in that a model's family declares is tried on numbers of its own and taken only where it gives
the same result, so a class with a familiar name and another meaning stays as it is.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from curvescope.kernels.attention.hf import NAME, register_hf
from curvescope.models.hf.module import attention_is, is_paired, is_transformers, small_outputs
from curvescope.models.model import Model
from curvescope.models.running.exchange import Change
from curvescope.models.running.standins import Ours, Standin
from curvescope.models.running.trial import agrees, rounding

LOG = logging.getLogger("curvescope")


@dataclass(frozen=True)
class Replacement:
    """A method of a submodule and what stands in for it."""

    module: nn.Module
    method: str
    ours: Ours


@dataclass(frozen=True)
class Fused:
    """What our kernels do in a module: the methods they replace, and whether attention is ours."""

    replacements: tuple[Replacement, ...]
    attention: bool

    def changes(self, module: nn.Module, *, second_order: bool) -> list[Change]:
        """Our kernels in place.

        Args:
            module: The module that they were found in.
            second_order: False where only first derivatives, and J v through Jᵀu, will be asked for.
        """
        methods = [
            Change(vars(r.module), r.method, partial(r.ours, second_order=second_order))
            for r in self.replacements
        ]
        return methods + (attention_is(module, NAME) if self.attention else [])


@torch.no_grad()
def fuse(model: Model) -> Fused:
    """Our kernels for a model as it is now."""
    parts = model.module.modules()
    found = [
        r for part in parts for r in (_replacement(model, part, s) for s in model.standins) if r is not None
    ]
    return Fused(tuple(found), _takes_our_attention(model))


def _replacement(model: Model, part: nn.Module, standin: Standin) -> Replacement | None:
    if not type(part).__name__.endswith(standin.ending) or standin.method in vars(part):
        return None
    candidates = standin.candidates(part)
    with model.whole(part) if candidates and not standin.certain else nullcontext():
        taken = next((ours for ours in candidates if _fits(part, standin, ours)), None)
    return None if taken is None else Replacement(part, standin.method, taken)


def _fits(part: nn.Module, standin: Standin, ours: Ours) -> bool:
    return standin.certain or agrees(part, ours, sequences=standin.sequences)


def _takes_our_attention(model: Model) -> bool:
    """Whether a transformers module can be told to use our attention, and then gives the same outputs."""
    module: Any = model.module
    if not is_transformers(module) or not getattr(module, "_supports_attention_backend", False):
        return False
    if is_paired(module):  # its attention to the encoder is between sequences of two lengths
        return False
    register_hf()
    own = [*model.settings(module), *model.gathered()]
    before = small_outputs(module, [*own, *attention_is(module, "eager")])
    if before is None:
        return False
    try:
        after = small_outputs(module, [*own, *attention_is(module, NAME)])
        error = torch.inf if after is None else float((before - after).abs().max())
    except Exception as error_:  # whatever a family does with a name it does not know
        LOG.debug("our attention does not fit %s: %s", type(module).__name__, error_)
        return False
    return error <= rounding(before) * max(float(before.abs().max()), 1e-30)
