"""Selection of the kernels that fit a model: the same function, with faster second derivatives.

Each replacement that a model's family declares is tested on random numbers, and used only if it gives the
same result. A class with a familiar name but another meaning keeps its own method.
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
from curvescope.models.running.equivalence_check import agrees, rounding
from curvescope.models.running.module_replacements import MethodReplacement, ReplacementFunction
from curvescope.models.running.patching import Change

LOG = logging.getLogger("curvescope")


@dataclass(frozen=True)
class InstalledReplacement:
    """A method of a submodule and its replacement."""

    module: nn.Module
    method: str
    replacement: ReplacementFunction


@dataclass(frozen=True)
class Fused:
    """Kernels for a module: the methods that they replace, and True if our attention is used."""

    replacements: tuple[InstalledReplacement, ...]
    attention: bool

    def changes(self, module: nn.Module, *, second_order: bool) -> list[Change]:
        """Return the changes that put our kernels into the module.

        Args:
            module: The module that the kernels were selected for.
            second_order: False if only first derivatives, and J v through Jᵀu, are needed.
        """
        methods = [
            Change(vars(r.module), r.method, partial(r.replacement, second_order=second_order))
            for r in self.replacements
        ]
        return methods + (attention_is(module, NAME) if self.attention else [])


@torch.no_grad()
def fuse(model: Model) -> Fused:
    """Return the kernels that fit a model."""
    parts = model.module.modules()
    replacements = [
        r
        for part in parts
        for r in (_replacement(model, part, s) for s in model.replacements)
        if r is not None
    ]
    return Fused(tuple(replacements), _takes_our_attention(model))


def _replacement(model: Model, part: nn.Module, kind: MethodReplacement) -> InstalledReplacement | None:
    if not type(part).__name__.endswith(kind.ending) or kind.method in vars(part):
        return None
    candidates = kind.candidates(part)
    with model.whole(part) if candidates and not kind.certain else nullcontext():
        chosen = next((function for function in candidates if _fits(part, kind, function)), None)
    return None if chosen is None else InstalledReplacement(part, kind.method, chosen)


def _fits(part: nn.Module, kind: MethodReplacement, function: ReplacementFunction) -> bool:
    return kind.certain or agrees(part, function, sequences=kind.sequences)


def _takes_our_attention(model: Model) -> bool:
    """Return True if a transformers module accepts our attention and then gives the same outputs."""
    module: Any = model.module
    if not is_transformers(module) or not getattr(module, "_supports_attention_backend", False):
        return False
    if is_paired(module):  # cross-attention has sequences of two lengths
        return False
    register_hf()
    changes = [*model.settings(module), *model.gathered()]
    before = small_outputs(module, [*changes, *attention_is(module, "eager")])
    if before is None:
        return False
    try:
        after = small_outputs(module, [*changes, *attention_is(module, NAME)])
        error = torch.inf if after is None else float((before - after).abs().max())
    except Exception as error_:  # a family may raise anything for an unknown name
        LOG.debug("our attention does not fit %s: %s", type(module).__name__, error_)
        return False
    return error <= rounding(before) * max(float(before.abs().max()), 1e-30)
