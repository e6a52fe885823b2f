"""Exact formulas for the curvature of attention, norms, feed-forward layers and whole networks, by subject.

    attention   one head, several heads, a model's own layer: every block, split, factored, applied
    softmax     its derivatives, and the moments under its weights
    norms       LayerNorm and RMSNorm
    ffn         feed-forward layers, plain and gated
    network     primitives, blocks and stacks, up to a complete model
    spectra     exact spectra
    bounds      certified bounds, and the growth of blocks
    landscape   the mean loss as a function of the sample size
    printed     formulas of papers, as printed and corrected: Kronecker forms, theorems and bounds

All formulas are written out and do not use the matrix-free operators, so that each can test the other. The
one exception is `attention.model_layer`, which uses autograd for the derivatives of the later layers.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a submodule such as `closed_form.attention` at its first use."""
    if name in __dir__():
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(module.name for module in iter_modules(__path__))
