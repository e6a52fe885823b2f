"""Batches in Hugging Face's format: dictionaries of `input_ids`, `attention_mask`, `labels`, …

The labels of a causal language model are its ids at the same positions, and such a model compares its outputs
at t with the label at t + 1. Here, targets align with outputs, so labels are shifted once when they are read:

    target_t = label_{t+1},   target_T = −100 (does not count).

Dictionaries of single rows, such as those of a `datasets.Dataset`, are padded on the right and combined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.tensors import IGNORED

LABELS = ("labels", "label")
IDS, EMBEDDED, MASK = "input_ids", "inputs_embeds", "attention_mask"
BOOKKEEPING = ("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length", "idx")
"""Entries that tokenizers and datasets add to the inputs, and that models do not accept."""
ROWS = 8  # rows per batch that is combined from single rows
SHIFTED = (
    "labels are shifted as Hugging Face does: the outputs at t are compared with the label at t + 1, and "
    "−100 does not count"
)
Row = dict[str, Tensor]


def has_labels(item: Any) -> bool:
    """Return True if an item is a dictionary with labels."""
    return isinstance(item, Mapping) and any(key in item for key in LABELS)


def row_of(item: Mapping[str, Any]) -> Row:
    """Convert the numeric entries of a dictionary to tensors, and drop all others."""
    names = ", ".join(map(str, item))
    if not has_labels(item):
        raise UsageError(
            f"expected items (inputs, targets) or a dictionary with labels, got a dict of {names}",
            hint="for a language model labels are the input_ids; cs.text_data reads texts",
        )
    found = {key: _tensor(value) for key, value in item.items() if key not in BOOKKEEPING}
    row = {key: value for key, value in found.items() if value is not None}
    if not any(key in row for key in LABELS) or len(row) < 2:
        raise UsageError(f"expected inputs and labels as numbers, got a dict of {names}")
    return row


def is_single(row: Row) -> bool:
    """Return True if a dictionary is one row and not a batch."""
    return labels_of(row).dim() == 0 or (IDS in row and row[IDS].dim() == 1)


def labels_of(row: Row) -> Tensor:
    """Return the labels, which may have several names."""
    return next(row[key] for key in LABELS if key in row)


def combine_rows(rows: Sequence[Row]) -> Row:
    """Combine single rows to a batch; shorter rows are padded on the right with ignored labels."""
    if any(row.keys() != rows[0].keys() for row in rows):
        raise UsageError(f"expected all rows to have {', '.join(rows[0])}, but some have other entries")
    batch: Row = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        longest = max((len(v) for v in values if v.dim()), default=0)
        if all(v.dim() == 1 for v in values) and any(len(v) < longest for v in values):
            fill = IGNORED if key in LABELS else 0
            values = [torch.nn.functional.pad(v, (0, longest - len(v)), value=fill) for v in values]
            if key == IDS and MASK not in rows[0]:
                masks = [torch.ones(len(row[IDS]), dtype=torch.int64) for row in rows]
                batch[MASK] = torch.stack([torch.nn.functional.pad(m, (0, longest - len(m))) for m in masks])
        batch[key] = torch.stack(values)
    return batch


def hides_start(inputs: object) -> bool:
    """Return True if a mask (B, T) among the inputs hides a first token: padding on the left."""
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, 0].all())


def inputs_and_targets(row: Row, *, shift: bool) -> tuple[Row, Tensor, bool]:
    """Return inputs, targets that align with outputs, and True if the labels were shifted.

    Args:
        row: A batch.
        shift: If True, integer labels (B, T) for ids (B, T), or for embeddings of them, belong to a model
            that predicts the next token.
    """
    labels = labels_of(row)
    inputs = {key: value for key, value in row.items() if key not in LABELS}
    tokens = row.get(IDS, row.get(EMBEDDED))
    is_token_labels = labels.dim() == 2 and not labels.is_floating_point()  # real numbers are not tokens
    moves = shift and is_token_labels and tokens is not None and labels.shape == tokens.shape[:2]
    if not moves:
        return inputs, labels, False
    ignored = torch.full_like(labels[:, :1], IGNORED)
    return inputs, torch.cat([labels[:, 1:], ignored], dim=1), True


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
