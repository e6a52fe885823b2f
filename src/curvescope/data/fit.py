"""Whether data fit a model: checked once, before the work, where both meet."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.errors import UsageError, warn
from curvescope.core.tensors.targets import IGNORED
from curvescope.data.batches import Batch, Batches
from curvescope.data.dicts import IDS, MASK
from curvescope.data.task_names import TASKS

UNSHIFTED = (
    "targets equal the inputs at every position: a model that sees its own token has nothing to predict; "
    "pair ids[:, :-1] with ids[:, 1:], or give a dictionary with labels, which is shifted"
)
SHIFTED_RIGHT = (
    "the decoder reads the labels, shifted to the right as Hugging Face does: the outputs at t are compared "
    "with the label at t, and −100 does not count"
)
DECODED = ("decoder_input_ids", "decoder_inputs_embeds")


def predicts_next(model: Any) -> bool:
    """Whether a model's outputs at t are about the token at t + 1, as far as it says."""
    task, causal = model.facts.get("task"), model.facts.get("causal")
    return task == "causal-lm" if task is not None else causal is not False


def fitted(batches: Batches, model: Any) -> Batches:
    """The batches as the module takes them.

    A module without the argument `input_ids` gets the ids alone, and a decoder behind an encoder the labels,
    shifted to the right.
    """
    if model.facts.get("task") == "seq2seq-lm":
        return with_decoder_inputs(batches, model.module)
    if not any(isinstance(b.inputs, Mapping) and IDS in b.inputs for b in batches) or _takes_names(model):
        return batches
    found = [Batch(_alone(b.inputs, model), b.targets, b.weights) for b in batches]
    return Batches(found, name=batches.name, notes=batches.notes, share=batches.share)


def with_decoder_inputs(batches: Batches, module: Any) -> Batches:
    """What the decoder reads, as its library makes it of labels (B, T), in batches that do not say it."""
    found = [_with_decoder_inputs(batch, module) for batch in batches]
    if all(a is b for a, b in zip(found, batches, strict=True)):
        return batches
    return Batches(found, name=batches.name, notes=[*batches.notes, SHIFTED_RIGHT], share=batches.share)


def _with_decoder_inputs(batch: Batch, module: Any) -> Batch:
    inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {IDS: batch.inputs}
    if any(key in inputs for key in DECODED):
        return batch
    labels = batch.targets
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 2:
        raise UsageError(
            "expected labels (B, T), which a decoder reads shifted to the right",
            hint="or give decoder_input_ids among the inputs",
        )
    try:
        ids = module.prepare_decoder_input_ids_from_labels(labels=labels)
    except ValueError as error:
        raise UsageError(f"the module makes no decoder_input_ids of labels: {error}") from error
    return Batch({**inputs, DECODED[0]: ids}, labels, batch.weights)


def _takes_names(model: Any) -> bool:
    own = getattr(model.module, "takes", None)  # of a function that stands behind the module
    signature = own if isinstance(own, inspect.Signature) else inspect.signature(model.module.forward)
    accepted = signature.parameters
    return IDS in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())


def _alone(inputs: Any, model: Any) -> Any:
    if not isinstance(inputs, Mapping) or IDS not in inputs:
        return inputs
    there = inputs.get(MASK, torch.ones_like(inputs[IDS])).bool()
    only_behind = there.dim() == 2 and not bool((there[:, 1:] & ~there[:, :-1]).any())
    only_behind = only_behind and model.facts.get("causal") is True
    if not bool(there.all()) and not only_behind:
        raise UsageError(
            f"{model.name!r} takes no attention_mask, and the one given hides tokens",
            hint="wrap it in a module with forward(self, input_ids, attention_mask)",
        )
    return inputs[IDS]


def check_ids(batches: Batches, model: Any) -> None:
    """Raise where a model that reads tokens is given real numbers, or ids that it has no token for."""
    V = _vocabulary(model)
    if V is None:
        return
    for batch in batches:
        ids = _ids(batch)
        if ids is None:
            continue
        if ids.is_floating_point() or ids.is_complex():
            raise UsageError(
                f"expected integer tokens (B, T), got {ids.dtype} {tuple(ids.shape)}",
                hint="ids.long(), if they are whole numbers",
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < V:
            task = f", which is what the task {batches.name!r} has" if batches.name in TASKS else ""
            raise UsageError(
                f"expected tokens from 0 to {V - 1}, the vocabulary of {model.name!r}, "
                f"got {int(ids.min())} to {int(ids.max())}{task}",
                hint="are they from another tokenizer?",
            )


def _vocabulary(model: Any) -> int | None:
    """The number of tokens a model reads, where it says so."""
    facts, main = model.facts, getattr(model.module, "main_input_name", IDS)
    V = facts.get("vocab_size")
    if not isinstance(V, int) or facts.get("inputs", "tokens") != "tokens" or main != IDS:
        return None
    try:
        table = getattr(model.module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers' word for a family that does not say
        table = None
    return max(V, getattr(table, "num_embeddings", 0))


def _ids(batch: Batch) -> Tensor | None:
    return batch.inputs.get(IDS) if isinstance(batch.inputs, Mapping) else batch.inputs


def warn_unshifted(batches: Batches, model: Any) -> None:
    """Warn where every target that counts is the input at its own position."""
    if predicts_next(model) and all(map(_repeats, batches)):
        warn(UNSHIFTED)


def _repeats(batch: Batch) -> bool:
    ids, y = _ids(batch), batch.targets
    if ids is None or not isinstance(y, Tensor) or y.shape != ids.shape or ids.dim() != 2:
        return False
    if ids.is_floating_point() or y.is_floating_point():
        return False
    y = y.to(ids.device)
    counted = y != IGNORED
    return bool(((y == ids) | ~counted).all() & counted.any())


def task_notes(batches: Batches, model: Any) -> list[str]:
    """What a reader should know where a text model is given a task with tokens of its own."""
    ids = _ids(batches[0])
    if batches.name not in TASKS or model.tokenizer is None or ids is None or ids.is_floating_point():
        return []
    return [
        f"the task {batches.name!r} has tokens of its own, and {model.name!r} has a tokenizer: "
        "it was not made for this task, and reads the ids as other tokens"
    ]


def padding_notes(batches: Batches, model: Any) -> list[str]:
    """What a reader should know where ids occur whose rows PyTorch gives no derivative (`padding_idx`)."""
    ids = [x for x in map(_ids, batches) if x is not None and not x.is_floating_point()]
    return [
        f"row {row} of {name} is no variable where it is looked up: PyTorch gives the row of a padding_idx "
        "no gradient, and it has no curvature here either"
        for name, layer in model.module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (row := layer.padding_idx) is not None
        if any(bool((x == row).any()) for x in ids)
    ]
