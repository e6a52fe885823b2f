"""Flat names of modules of this room, such as `closed_form.attention_split`, for scripts that use them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, final

NAMES = {
    "activations": "ffn.activations",
    "assembly": "network.assembly",
    "attention_checks": "attention.checks",
    "attention_core": "attention.core",
    "attention_curvature": "attention.hessian",
    "attention_head": "attention.sums.head",
    "attention_layer": "attention.layer",
    "attention_multihead": "attention.multihead",
    "attention_outer": "attention.sums.outer",
    "attention_products": "attention.products",
    "attention_split": "attention.split",
    "attention_terms": "attention.sums.terms",
    "attention_theorems": "printed.head_theorems",
    "block": "network.block",
    "block_norms": "attention.block_norms",
    "block_theorems": "printed.block_theorems",
    "bound_locals": "bounds.per_query",
    "bound_sums": "bounds.sums",
    "bounds_as_printed": "printed.bounds",
    "bounds_block": "bounds.block",
    "bounds_corrected": "bounds.operator_norms",
    "ffn_statistics": "ffn.statistics",
    "from_model": "network.from_model",
    "growth": "bounds.growth",
    "kronecker": "printed.kronecker",
    "linear_attention": "attention.linear",
    "model_rest": "attention.rest",
    "moments": "softmax.moments",
    "norm_theorems": "printed.norm_theorems",
    "primitive_attention": "network.attention",
    "primitive_ends": "network.ends",
    "primitive_tokens": "network.tokens",
    "primitives": "network.primitives",
    "reduction": "spectra.reduction",
    "stack": "network.stack",
    "third_order": "norms.third softmax.third",
    "vec_rules": "printed.vec_rules",
}


@final
class Forwarding(ModuleType):
    """A module that has the names of others, which are imported when the first of them is asked for."""

    def __init__(self, name: str, targets: list[str]):
        super().__init__(name, f"See {' and '.join(targets)}.")
        self._targets = targets

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # what importlib and inspect ask of every module
            for module in map(import_module, self._targets):
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def register(package: str) -> None:
    """Make `package.attention_split` and so on importable."""
    for name, homes in NAMES.items():
        targets = [f"{package}.{home}" for home in homes.split()]
        sys.modules[f"{package}.{name}"] = Forwarding(f"{package}.{name}", targets)
