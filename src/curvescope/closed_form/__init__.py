"""Exact formulas for the curvature of attention, norms, feed-forward layers and whole networks, by subject.

    attention   one head, several heads, a model's own layer: every block, split, factored, applied
    softmax     its derivatives, and the moments under its weights
    norms       LayerNorm and RMSNorm
    ffn         feed-forward layers, plain and gated
    network     primitives, blocks, stacks and how they are put together; a whole model
    spectra     spectra that are known exactly
    bounds      certified bounds, and how blocks grow
    landscape   the mean loss as the sample grows, at a point and around it
    printed     what papers print: Kronecker forms, theorems and bounds, as stated and put right

Everything here is written out, and nothing knows the matrix-free operators, so that each can be the
other's oracle. The one exception is `attention.model_layer`: what a layer sees of the network behind it is
differentiated by machine.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """`closed_form.attention` and so on, imported when first used."""
    if name in __dir__():
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(module.name for module in iter_modules(__path__))
