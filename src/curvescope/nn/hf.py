"""Attention of transformers (Hugging Face) other than its "sdpa": ours, by a name in the configuration.

Models with "sdpa" call PyTorch's function, which `dropin` sees. Those with "eager", or a kernel of another
package, get "curvescope.nn", which is transformers' own "sdpa" with our function in it, in every thread, if
the outputs on a small input are the same. A soft cap of the scores and sinks have no such form: there eager
attention stays, which has every derivative in memory quadratic in the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError
from curvescope.models.hf.module import ATTENTION, attention_is, is_transformers, small_outputs
from curvescope.models.running.exchange import Change, exchanged
from curvescope.models.running.trial import rounding
from curvescope.nn.dropin import Functions, Replacements, is_on

NAME = "curvescope.nn"


@dataclass(frozen=True)
class Attention:
    """What becomes of the attention of transformers' modules inside a model, by names of submodules."""

    changes: list[Change] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Our attention in the configurations, inside."""
        with exchanged(self.changes):
            yield

    def exchange(self) -> None:
        """Our attention in the configurations, for good. They are saved without it."""
        for holder, name, value in self.changes:
            holder[name] = value


def examined(model: nn.Module) -> Attention:
    """Try our attention in every module of transformers in a model."""
    found = Attention()
    for prefix, module in _outermost(model):
        own = getattr(module.config, ATTENTION, None)
        names = [f"{prefix}{name}" for name, part in module.named_modules() if _attends(part)]
        if own is None or not names:
            continue
        if own in ("sdpa", NAME):
            found.replaced.update(dict.fromkeys(names, "scaled_dot_product_attention"))
            continue
        reason = _why_not(module)
        if reason is None:
            found.replaced.update(dict.fromkeys(names, f"{own} attention of transformers"))
            found.changes.extend(attention_is(module, NAME))
        else:
            found.kept.update(dict.fromkeys(names, f"{own} attention of transformers: {reason}"))
    return found


def _attends(part: nn.Module) -> bool:
    """Whether a module is an attention layer, and not what wraps one."""
    names = [type(inner).__name__ for inner in part.modules()]
    return names[0].endswith("Attention") and not any(name.endswith("Attention") for name in names[1:])


def _outermost(model: nn.Module) -> list[tuple[str, Any]]:
    """The outermost modules that bring a transformers configuration, and what stands before their names."""
    found: list[tuple[str, Any]] = []
    for name, part in model.named_modules():
        if is_transformers(part) and not any(name.startswith(prefix) for prefix, _ in found):
            found.append((f"{name}." if name else "", part))
    return found


def _why_not(module: Any) -> str | None:
    """Why our attention cannot take the place of a module's own; None if it can."""
    if getattr(module.config, "output_attentions", False):
        return "its weights are asked for"
    register()
    seen = Replacements("")
    try:
        before = small_outputs(module, attention_is(module, "eager"))
        with Functions(seen, module):
            after = small_outputs(module, attention_is(module, NAME))
    except (CurvescopeError, RuntimeError, ValueError, TypeError, KeyError) as error:
        return f"with ours it failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if before is None or after is None:
        return "no small input is known on which both could be compared"
    if not seen.calls["scaled_dot_product_attention"]:
        return "this family does not let its attention be chosen"
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

    if is_on():
        return sdpa_attention_forward(module, *args, **kwargs)
    with Functions(Replacements(""), module):
        return sdpa_attention_forward(module, *args, **kwargs)
