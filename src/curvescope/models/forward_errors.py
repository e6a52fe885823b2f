"""Errors of a forward pass, with messages that name the cause.

PyTorch says "index out of range in self" for an id that an embedding does not have, and a shape error deep in
a module looks like one of curvescope. These messages name the inputs that do not fit. An error that the
unmodified module also raises is reported as the module's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, ModuleError, UsageError
from curvescope.core.tensors import Tree, leaves
from curvescope.models.model import Model

SAME_LOSS = 1e-4  # relative difference that another order of operations may cause in float32


@contextmanager
def module_errors(model: Model, inputs: Tree, *, splits: bool) -> Iterator[None]:
    """Convert a RuntimeError inside into a ModuleError: the unmodified module raises it.

    Args:
        model: The model that is called inside.
        inputs: Its inputs, for the error.
        splits: False if the model's outputs are its loss; then its tensors have one more axis here.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        first, shapes = str(error).partition("\n")[0], [tuple(t.shape) for t in leaves(inputs)]
        source = f"the forward of {model.name} itself"
        if not splits:
            source, shapes = f"the loss of {model.name} itself", [shape[1:] for shape in shapes[1:]]
        raise ModuleError(
            f"{source} raised an error on inputs of shape {', '.join(map(str, shapes))}: {first}",
            hint="the module also raises it without curvescope: call it on a batch"
            if model.widening is None
            else "cs.load(…, dtype='float32'), if it uses parts of layers outside of them",
        ) from error


@contextmanager
def attributed_errors(call: Callable[[], Tensor]) -> Iterator[None]:
    """Raise an error as the module's own if the module raises it without our changes, too.

    Args:
        call: Calls the module as its user does, inside `module_errors`.
    """
    try:
        yield
    except RuntimeError as error:
        module_error = _own_error(call) if type(error) is RuntimeError else None
        if module_error is None or str(module_error.__cause__) != str(error):
            raise
        raise module_error from error


def _own_error(call: Callable[[], Tensor]) -> ModuleError | None:
    try:
        with torch.no_grad():
            call()
    except ModuleError as error:
        return error
    except Exception:  # any other error has another cause
        return None
    return None


@contextmanager
def input_errors(inputs: Tree) -> Iterator[None]:
    """Convert errors of embeddings into UsageErrors that name the ids given."""
    try:
        yield
    except RuntimeError as error:
        if "'indices'" not in str(error):  # PyTorch's word for ids
            raise
        kinds = ", ".join(str(t.dtype) for t in leaves(inputs))
        raise UsageError(
            f"expected integer inputs for an embedding, got {kinds}",
            hint="ids.long(), if they are integers",
        ) from error
    except IndexError as error:
        ids = [t for t in leaves(inputs) if not t.is_floating_point() and t.numel()]
        if not ids:
            raise
        low, high = min(int(t.min()) for t in ids), max(int(t.max()) for t in ids)
        raise UsageError(
            f"an embedding has no row for some of the inputs, which range from {low} to {high}: {error}",
            hint="are there ids outside its vocabulary?",
        ) from error


def check_left_padding(name: str, ours: float, theirs: float) -> None:
    """Raise if a loss on sequences that are padded on the left depends on the kind of attention.

    Args:
        name: Name of the model.
        ours: The loss with attention that can be differentiated twice.
        theirs: The loss of the module as its user calls it.
    """
    if not math.isclose(ours, theirs, rel_tol=SAME_LOSS):
        raise CurvescopeError(
            f"on sequences padded on the left, the loss of {name} is {ours:.6g} with twice-differentiable "
            f"attention and {theirs:.6g} with its own",
            hint="pad on the right, or give the first label after the padding no weight (-100)",
        )


@torch.no_grad()
def not_finite(model: Model, parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of NaN or infinite entries of each block that has any."""
    sums = [p.detach().sum() for p in parameters.values()]
    if not sums or bool(torch.isfinite(torch.stack([s.to(sums[0].device) for s in sums])).all()):
        return {}
    doubtful = {
        name: p
        for (name, p), total in zip(parameters.items(), sums, strict=True)
        if not bool(torch.isfinite(total))
    }
    counts = {
        name: int((~torch.isfinite(block.take(doubtful[block.parameter].detach()))).sum())
        for name, block in model.blocks.items()
        if block.parameter in doubtful
    }
    return {name: count for name, count in counts.items() if count}


def describe_counts(counts: Mapping[str, int]) -> str:
    """Format counts: `L0.W_Q (3 entries), L1.W_K (1 entry) and 2 more blocks`."""
    named = [f"{name} ({count} {'entry' if count == 1 else 'entries'})" for name, count in counts.items()]
    more = len(named) - 3
    listed = ", ".join(named[:3])
    return listed + (f" and {more} more block{'s' if more > 1 else ''}" if more > 0 else "")


def check_weights(model: Model) -> None:
    """Raise if a parameter is a DTensor, or has NaN or infinite entries; the message names the blocks."""
    if model.sharding is None and any(hasattr(p, "placements") for p in model.module.parameters()):
        raise UsageError(
            f"expected unsharded parameters, but {model.name!r} has DTensors, as fully_shard makes them",
            hint="use model = cs.distributed.shard(module)",
        )
    bad_entries = not_finite(model, dict(model.named_parameters()))
    if bad_entries:
        raise UsageError(
            f"expected finite weights, but {model.name!r} has NaN or infinite ones in "
            f"{describe_counts(bad_entries)}",
            hint="the checkpoint is broken, or training diverged before it was written",
        )


def check_vocabulary(model: Model) -> None:
    """Raise unless the model reads tokens."""
    tokens = model.facts.get("inputs", "tokens") == "tokens" and model.facts.get("vocab_size")
    if not tokens or "E" not in model.blocks:
        raise UsageError(
            f"expected a model with a token vocabulary, but {model.name!r} reads no tokens",
            hint="language models and text encoders have one",
        )
