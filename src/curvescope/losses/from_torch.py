"""Conversion of torch's losses: modules of `torch.nn` and functions of `torch.nn.functional`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from curvescope.core.errors import UsageError
from curvescope.losses.base import Loss
from curvescope.losses.cross_entropy import CrossEntropy, NegativeLogLikelihood
from curvescope.losses.elementwise import RULES, SquaredError, TorchElementwise

FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.kl_div: nn.KLDivLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
}
"""Module by function; `functools.partial` gives its options."""
LOSSES: dict[type[nn.Module], Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: CrossEntropy.of,
    nn.NLLLoss: NegativeLogLikelihood,
    nn.MSELoss: SquaredError.of,
    **dict.fromkeys(RULES, TorchElementwise),
}
"""Loss by module."""
CUSTOM_HINT = (
    "define the number of its terms: cs.CustomLoss(sum, count), or cs.Problem(…, loss_fn=f, terms=…)"
)


def from_torch(loss: Any) -> Loss | None:
    """Convert torch's loss; return None for anything that is not a function or a module."""
    if isinstance(loss, type):
        named = f"{loss.__name__}(), an object of that class" if issubclass(loss, nn.Module | Loss) else None
        raise UsageError(f"expected a loss, got the class {loss.__name__}", hint=named)
    function, options = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    if callable(function) and not isinstance(function, nn.Module):
        loss = _module_of(function, options, loss)
    if not isinstance(loss, nn.Module):
        return None
    module: Any = loss
    if type(loss) not in LOSSES:
        raise UsageError(f"expected a known loss, got a custom {type(loss).__name__}", hint=CUSTOM_HINT)
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        raise UsageError(
            f"expected torch's {type(loss).__name__}, got one with a custom forward or hooks",
            hint=CUSTOM_HINT,
        )
    if module.reduction not in ("mean", "sum", "batchmean"):
        raise UsageError(
            f"expected {type(loss).__name__} with reduction 'mean' or 'sum', got {module.reduction!r}: "
            "a loss is one number",
        )
    return LOSSES[type(loss)](module)


def _module_of(function: Any, options: dict[str, Any], given: Any) -> nn.Module:
    """Return the module that equals a function with these options."""
    name = getattr(function, "__name__", type(function).__name__)
    if all(function is not known for known in FUNCTIONS) or (isinstance(given, partial) and given.args):
        raise UsageError(f"expected a known loss, got the function {name}", hint=CUSTOM_HINT)
    try:
        return FUNCTIONS[function](**options)
    except TypeError as error:
        raise UsageError(f"expected options of {FUNCTIONS[function].__name__} for {name}: {error}") from error
