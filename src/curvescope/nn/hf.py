"""Replace attention of Transformers (Hugging Face) other than "sdpa" by ours, through the configuration.

Models with "sdpa" call PyTorch's function, which `dropin` replaces. Models with "eager", or a kernel of
another package, get "curvescope.nn" in every thread, if the outputs on a small input are equal. It is
Transformers' own "sdpa" with our function inside. Soft caps of scores and attention sinks cannot be expressed
this way: such models keep eager attention, which has every derivative, in memory quadratic in the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError
from curvescope.models.hf.module import ATTENTION, attention_is, is_transformers, small_outputs
from curvescope.models.running.equivalence_check import rounding
from curvescope.models.running.patching import Change, patched
from curvescope.nn.dropin import Functions, Replacements, is_on

NAME = "curvescope.nn"
BEYOND = ("softcap", "s_aux")  # a soft cap and attention sinks: older "sdpa" ignores them silently


@dataclass(frozen=True)
class Attention:
    """Attention of Transformers modules in a model: replaced and kept, by names of submodules."""

    changes: list[Change] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Use our attention in the configurations inside the context."""
        with patched(self.changes):
            yield

    def exchange(self) -> None:
        """Use our attention in the configurations permanently. Saved configurations do not contain it."""
        for holder, name, value in self.changes:
            holder[name] = value


def replaceable(model: nn.Module) -> Attention:
    """Try our attention in every module of transformers in a model."""
    attention = Attention()
    for prefix, module in _outermost(model):
        own = getattr(module.config, ATTENTION, None)
        names = [f"{prefix}{name}" for name, part in module.named_modules() if _attends(part)]
        if own is None or not names:
            continue
        if own in ("sdpa", NAME):
            attention.replaced.update(dict.fromkeys(names, "scaled_dot_product_attention"))
            continue
        reason = _why_not(module)
        if reason is None:
            attention.replaced.update(dict.fromkeys(names, f"{own} attention of transformers"))
            attention.changes.extend(attention_is(module, NAME))
        else:
            attention.kept.update(dict.fromkeys(names, f"{own} attention of transformers: {reason}"))
    return attention


def _attends(part: nn.Module) -> bool:
    """Return True if a module is an attention layer, not a wrapper of one."""
    names = [type(inner).__name__ for inner in part.modules()]
    return names[0].endswith("Attention") and not any(name.endswith("Attention") for name in names[1:])


def _outermost(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the outermost modules with a Transformers configuration, and the prefix of their submodules'
    names.
    """
    outermost: list[tuple[str, Any]] = []
    for name, part in model.named_modules():
        if is_transformers(part) and not any(name.startswith(prefix) for prefix, _ in outermost):
            outermost.append((f"{name}." if name else "", part))
    return outermost


def _why_not(module: Any) -> str | None:
    """Reason why our attention cannot replace that of a module; None if it can."""
    if getattr(module.config, "output_attentions", False):
        return "its attention weights are requested"
    register()
    seen = Replacements("")
    try:
        before = small_outputs(module, attention_is(module, "eager"))
        with Functions(seen, module):
            after = small_outputs(module, attention_is(module, NAME))
    except (CurvescopeError, RuntimeError, ValueError, TypeError, KeyError) as error:
        return f"it fails with ours: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if before is None or after is None:
        return "there is no known small input to compare both"
    if not seen.calls["scaled_dot_product_attention"]:
        return "this model family has no choice of attention"
    error = float((before - after).abs().max()) / max(float(before.abs().max()), 1e-30)
    return None if error <= rounding(before) else f"outputs with ours differ by {error:.0e}"


def register() -> None:
    """Make "curvescope.nn" an attention of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in BEYOND:
        if kwargs.get(name) is not None:
            raise ValueError(f"`sdpa` attention does not support `{name}`")
    if is_on():
        return sdpa_attention_forward(module, *args, **kwargs)
    with Functions(Replacements(""), module):
        return sdpa_attention_forward(module, *args, **kwargs)
