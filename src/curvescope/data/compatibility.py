"""Checks that data and model fit together, made once before the computation.

Batches for a user's function loss_fn(model, batch) may be any tree, and the function gets them unchanged.
Such a batch is never cut. It is treated as one sequence: every tensor gets a leading axis of length one, so
that other code can move, compare and count it. Other values (words, numbers) are stored in `OpaqueBatches`
until the batch is rebuilt.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor, nn

from curvescope.core.errors import UsageError, warn
from curvescope.core.tensors import IGNORED
from curvescope.data.batches import Batch, Batches, refuse_iterator, shuffle_notes
from curvescope.data.dict_batches import IDS, MASK
from curvescope.data.task_names import TASKS

UNSHIFTED = (
    "targets equal the inputs at every position, so a model that sees its own token has nothing to predict; "
    "pair ids[:, :-1] with ids[:, 1:], or give a dictionary with labels, which is shifted"
)
SHIFTED_RIGHT = (
    "the decoder reads the labels, shifted to the right as Hugging Face does: the outputs at t are compared "
    "with the label at t, and −100 does not count"
)
DECODED = ("decoder_input_ids", "decoder_inputs_embeds")


def predicts_next(model: Any) -> bool:
    """Return True if a model declares that its outputs at t predict the token at t + 1."""
    task, causal = model.facts.get("task"), model.facts.get("causal")
    return task == "causal-lm" if task is not None else causal is not False


def fitted(batches: Batches, model: Any) -> Batches:
    """Convert batches to the arguments of the module.

    A module without the argument `input_ids` gets only the ids, and a decoder after an encoder gets the
    labels, shifted to the right.
    """
    if model.facts.get("task") == "seq2seq-lm":
        return with_decoder_inputs(batches, model.module)
    if not any(isinstance(b.inputs, Mapping) and IDS in b.inputs for b in batches) or _takes_names(model):
        return batches
    fitted_batches = [Batch(_ids_only(b.inputs, model), b.targets, b.weights) for b in batches]
    return Batches(fitted_batches, name=batches.name, notes=batches.notes, share=batches.share)


def with_decoder_inputs(batches: Batches, module: Any) -> Batches:
    """Add the decoder inputs that the library derives from labels (B, T) to batches without them."""
    completed = [_with_decoder_inputs(batch, module) for batch in batches]
    if all(a is b for a, b in zip(completed, batches, strict=True)):
        return batches
    return Batches(completed, name=batches.name, notes=[*batches.notes, SHIFTED_RIGHT], share=batches.share)


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
        raise UsageError(f"the module cannot make decoder_input_ids from labels: {error}") from error
    return Batch({**inputs, DECODED[0]: ids}, labels, batch.weights)


def _takes_names(model: Any) -> bool:
    takes = getattr(model.module, "takes", None)  # set if a function replaces the module
    signature = takes if isinstance(takes, inspect.Signature) else inspect.signature(model.module.forward)
    accepted = signature.parameters
    return IDS in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())


def _ids_only(inputs: Any, model: Any) -> Any:
    if not isinstance(inputs, Mapping) or IDS not in inputs:
        return inputs
    is_token = inputs.get(MASK, torch.ones_like(inputs[IDS])).bool()
    hides_end_only = is_token.dim() == 2 and not bool((is_token[:, 1:] & ~is_token[:, :-1]).any())
    hides_end_only = hides_end_only and model.facts.get("causal") is True
    if not bool(is_token.all()) and not hides_end_only:
        raise UsageError(
            f"{model.name!r} takes no attention_mask, and the one given hides tokens",
            hint="wrap it in a module with forward(self, input_ids, attention_mask)",
        )
    return inputs[IDS]


def check_ids(batches: Batches, model: Any) -> None:
    """Raise if a model that reads tokens gets real numbers, or ids outside its vocabulary."""
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
                hint="ids.long(), if they are integers",
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < V:
            task = f", which is what the task {batches.name!r} has" if batches.name in TASKS else ""
            raise UsageError(
                f"expected tokens from 0 to {V - 1}, the vocabulary of {model.name!r}, "
                f"got {int(ids.min())} to {int(ids.max())}{task}",
                hint="are they from another tokenizer?",
            )


def _vocabulary(model: Any) -> int | None:
    """Size of a model's vocabulary, if it is known."""
    facts, main = model.facts, getattr(model.module, "main_input_name", IDS)
    V = facts.get("vocab_size")
    if not isinstance(V, int) or facts.get("inputs", "tokens") != "tokens" or main != IDS:
        return None
    try:
        table = getattr(model.module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # raised by families in transformers without this information
        table = None
    return max(V, getattr(table, "num_embeddings", 0))


def _ids(batch: Batch) -> Tensor | None:
    return batch.inputs.get(IDS) if isinstance(batch.inputs, Mapping) else batch.inputs


def warn_unshifted(batches: Batches, model: Any) -> None:
    """Warn if every counted target equals the input at its own position."""
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
    """Return the notes on a text model that is given a task with its own tokens."""
    ids = _ids(batches[0])
    if batches.name not in TASKS or model.tokenizer is None or ids is None or ids.is_floating_point():
        return []
    return [
        f"the task {batches.name!r} has tokens of its own, and {model.name!r} has a tokenizer: "
        "it was not made for this task, and reads the ids as other tokens"
    ]


def padding_notes(batches: Batches, model: Any) -> list[str]:
    """Return the notes on ids whose embedding rows get no derivative in PyTorch (`padding_idx`)."""
    ids = [x for x in map(_ids, batches) if x is not None and not x.is_floating_point()]
    return [
        f"row {row} of {name} is constant in lookups: PyTorch gives the row of a padding_idx no gradient, so "
        "it has no curvature here either"
        for name, layer in model.module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (row := layer.padding_idx) is not None
        if any(bool((x == row).any()) for x in ids)
    ]


MAX_BYTES = 2**30
Terms = float | Sequence[float] | Callable[[Any], float] | str | None
"""Number of terms that the loss of a batch averages over: a number, one for each batch, or a function of a
batch; "sum" for a loss that is a plain sum."""
SUM = "sum"


@dataclass(frozen=True)
class _TensorSlot:
    """Position of a tensor in a batch."""

    index: int


@final
class OpaqueBatches:
    """Non-tensor parts of batches; `pack` and `unpack` convert."""

    def __init__(self) -> None:
        self._skeletons: list[Any] = []

    def pack(self, batch: Any) -> dict[str, Tensor]:
        """Return the tensors of a batch, (1, …) each, after an entry with the number of the batch."""
        number, tensors = len(self._skeletons), []
        self._skeletons.append(_without_tensors(batch, tensors))
        return {f"{number}": torch.zeros(1), **{f"{number}.{i}": t[None] for i, t in enumerate(tensors)}}

    def unpack(self, inputs: Mapping[str, Tensor]) -> Any:
        """Rebuild a batch with these tensors."""
        number, *names = inputs
        return _with_tensors(self._skeletons[int(number)], [inputs[name][0] for name in names])


def opaque_batches(data: Any, terms: Terms) -> tuple[Batches, OpaqueBatches]:
    """Batches for a user's function: a list or a loader has several; a tuple, dictionary or tensor is one."""
    items, notes = _read(data)
    counts, opaque = _counted(items, terms), OpaqueBatches()
    batches = [
        Batch(opaque.pack(item), torch.zeros(1), torch.tensor([n], dtype=torch.float64))
        for item, n in zip(items, counts, strict=True)
    ]
    return Batches(batches, name="data", notes=notes), opaque


def _read(data: Any) -> tuple[list[Any], list[str]]:
    refuse_iterator(data)
    if isinstance(data, Batches):
        parts = [(b.inputs, b.targets) if b.weights is None else (*_pair(b), b.weights) for b in data]
        return parts, list(data.notes)
    if isinstance(data, list):
        if data and all(isinstance(item, Tensor) for item in data):
            raise UsageError(
                "expected one batch or a list of them, got a list of tensors, which may be either",
                hint="(x, y) is one batch of a loss_fn, [(x, y), …] are several",
            )
        return data, []
    if isinstance(data, tuple | Mapping | Tensor) or not isinstance(data, Iterable):
        return [data], []
    return list(_copies(data)), shuffle_notes(data)


def _pair(batch: Batch) -> tuple[Any, Any]:
    return batch.inputs, batch.targets


def _copies(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield copies of the loader's batches, because it may write all of them into the same memory."""
    size = 0
    for item in loader:
        tensors: list[Tensor] = []
        skeleton = _without_tensors(item, tensors)
        size += sum(t.numel() * t.element_size() for t in tensors)
        if size > MAX_BYTES:
            raise UsageError(f"the loader holds more than {MAX_BYTES} bytes", hint="take fewer batches of it")
        yield _with_tensors(skeleton, [t.detach().clone() for t in tensors])


def _counted(batches: list[Any], terms: Terms) -> list[float]:
    """N_b of every batch."""
    if not batches:
        raise UsageError("expected at least one batch, got none")
    if terms is None and len(batches) > 1:
        raise UsageError(
            f"expected terms for loss_fn with {len(batches)} batches: the number of terms that each loss "
            f"averages over",
            hint="terms=lambda batch: len(batch[0]), a number, one for each batch, or 'sum'",
        )
    if terms is None or (isinstance(terms, str) and terms == SUM):
        return [1.0] * len(batches)
    if callable(terms):
        counts: list[Any] = [terms(batch) for batch in batches]
    elif isinstance(terms, Real):
        counts = [terms] * len(batches)
    elif isinstance(terms, Sequence) and not isinstance(terms, str) and len(terms) == len(batches):
        counts = list(terms)
    else:
        raise UsageError(
            f"expected terms as a number, one for each of {len(batches)} batches, a function of a batch, or "
            f"'sum', got {terms!r:.60}"
        )
    numbers = [float(n) if isinstance(n, Real | Tensor) else float("nan") for n in counts]
    if not all(isfinite(n) and n >= 0 for n in numbers):
        raise UsageError(f"expected a number of terms for each batch, got {counts!r:.60}")
    return numbers


def _without_tensors(tree: Any, tensors: list[Tensor]) -> Any:
    """Replace the tensors of a tree by slots, and append them to `tensors`."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _TensorSlot(len(tensors) - 1)
    return _mapped(tree, lambda branch: _without_tensors(branch, tensors))


def _with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, _TensorSlot):
        return tensors[tree.index]
    return _mapped(tree, lambda branch: _with_tensors(branch, tensors))


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Map the entries of a container of any kind (e.g. BatchEncoding); return other values unchanged."""
    if isinstance(tree, Mapping):
        container: Any = copy.copy(tree) if hasattr(tree, "__setitem__") else dict(tree)
        for key, value in tree.items():
            container[key] = function(value)
        return container
    if isinstance(tree, tuple | list):
        branches = [function(branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return tree
