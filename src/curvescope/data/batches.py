"""Batches: data that can be read again, in the same order, and that counts its terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.targets import IGNORED

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Inputs, targets and optional weights of some sequences; axis 0 counts the sequences.

    Targets align with the model's outputs: integers (B, …) where −100 does not count, or floats of the
    outputs' shape. Weights (None = all 1) have one number per term, or anything that broadcasts to that.
    """

    inputs: Inputs
    targets: Tensor
    weights: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Length of axis 0."""
        return self.targets.shape[0]

    def tensors(self) -> list[Tensor]:
        """Inputs, targets and weights, as far as they are there."""
        inputs = list(self.inputs.values()) if isinstance(self.inputs, Mapping) else [self.inputs]
        return [*inputs, self.targets, *([] if self.weights is None else [self.weights])]

    def map(self, move: Any) -> Batch:
        """The batch with `move` applied to each tensor."""
        inputs = {k: move(v) for k, v in self.inputs.items()} if isinstance(self.inputs, Mapping) else None
        return Batch(
            move(self.inputs) if inputs is None else inputs,
            move(self.targets),
            None if self.weights is None else move(self.weights),
        )

    def __getitem__(self, index: slice) -> Batch:
        return self.map(lambda tensor: tensor[index])


class Batches(Sequence[Batch]):
    """A re-readable sequence of batches.

    Curvature is a sum over terms, read once per product: data that could be read only once would give
    the zero operator the second time, so generators are refused.
    """

    def __init__(self, batches: Sequence[Batch], *, name: str = "data"):
        if not isinstance(batches, Sequence):
            raise UsageError(
                f"expected a list of Batch, got {type(batches).__name__}, which can be read only once",
                hint="Batches.from_tensors(x, y, batch_size=8), or Batches.from_loader(loader)",
            )
        self._batches = tuple(batch for batch in map(_checked, batches) if batch.num_sequences)
        self.name = name
        if not self._batches:
            raise UsageError("expected at least one sequence, got none")

    @classmethod
    def from_tensors(
        cls,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        batch_size: int | None = None,
        name: str = "tensors",
    ) -> Self:
        """Consecutive batches of `batch_size` sequences (default: one batch) of tensors in memory."""
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"expected a batch_size of at least 1, got {batch_size}")
        everything = _checked(Batch(inputs, torch.as_tensor(targets), weights))
        total = everything.num_sequences
        step = total if batch_size is None else batch_size
        return cls([everything[i : i + step] for i in range(0, total, max(step, 1))], name=name)

    @classmethod
    def from_loader(cls, loader: Iterable[Any], *, max_bytes: int = 2**30, name: str = "loader") -> Self:
        """Every batch of a DataLoader, or of any finite iterable of (inputs, targets[, weights]), kept.

        Raises when the tensors pass `max_bytes`.
        """
        if isinstance(loader, Iterator):
            raise UsageError(
                f"expected a DataLoader or a list of pairs, got a one-pass {type(loader).__name__}",
                hint="pass the loader itself, or list(iterator)",
            )
        kept: list[Batch] = []
        size = 0
        for item in loader:
            batch = item if isinstance(item, Batch) else _batch_of(item)
            kept.append(batch)
            size += _bytes(batch)
            if size > max_bytes:
                raise UsageError(
                    f"the loader holds more than max_bytes={max_bytes} ({len(kept)} batches read)",
                    hint="take fewer sequences, or raise max_bytes",
                )
        return cls(kept, name=name)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        found = self._batches[index]
        return found if isinstance(found, Batch) else Batches(found, name=self.name)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    @property
    def num_sequences(self) -> int:
        """Sequences in all batches."""
        return sum(batch.num_sequences for batch in self._batches)

    @property
    def num_terms(self) -> int:
        """Counted targets (integers other than −100), or sequences where targets are real numbers.

        A loss may weigh its terms: `Problem.num_terms` is what a product is divided by.
        """
        return sum(
            b.num_sequences if b.targets.is_floating_point() else int((b.targets != IGNORED).sum())
            for b in self._batches
        )

    def __repr__(self) -> str:
        counts = f"{len(self)} batches, {self.num_sequences} sequences, {self.num_terms} terms"
        return f"Batches({self.name!r}: {counts})"


def as_batches(data: Any) -> Batches:
    """`data` as Batches: itself, a DataLoader or list of pairs, or one (inputs, targets) pair of tensors."""
    if isinstance(data, Batches):
        return data
    if isinstance(data, tuple) and len(data) in (2, 3) and isinstance(data[1], Tensor):
        return Batches.from_tensors(*data)
    if isinstance(data, Iterable):
        return Batches.from_loader(data)
    raise UsageError(
        f"expected Batches, (inputs, targets) or a DataLoader, got {type(data).__name__}",
        hint="cs.Batches.from_tensors(x, y, batch_size=8)",
    )


def _checked(batch: Batch) -> Batch:
    if not isinstance(batch, Batch):
        raise UsageError(f"expected a Batch, got {type(batch).__name__}")
    tensors = list(batch.inputs.values()) if isinstance(batch.inputs, Mapping) else [batch.inputs]
    for item in batch.tensors():
        if not isinstance(item, Tensor):
            raise UsageError(
                f"expected inputs, targets and weights as tensors, got a {type(item).__name__}",
                hint="torch.as_tensor(x) makes one",
            )
    lengths = {t.shape[0] if t.dim() else -1 for t in [*tensors, batch.targets]}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in [*tensors, batch.targets])
        raise ShapeError(
            f"expected inputs and targets with the same number of sequences, got shapes {shapes}"
        )
    if batch.weights is not None:
        if batch.weights.shape[:1] != batch.targets.shape[:1]:
            raise ShapeError(
                f"expected one weight per term, got shape {tuple(batch.weights.shape)} "
                f"for targets {tuple(batch.targets.shape)}"
            )
        if not bool(((batch.weights >= 0) & torch.isfinite(batch.weights)).all()):
            raise UsageError("expected weights that are finite and not negative")
    return batch


def _batch_of(item: Any) -> Batch:
    if isinstance(item, list | tuple) and len(item) in (2, 3):
        return _checked(Batch(*item))
    raise UsageError(
        f"expected items (inputs, targets) or (inputs, targets, weights) from the loader, "
        f"got a {type(item).__name__}"
    )


def _bytes(batch: Batch) -> int:
    return sum(t.numel() * t.element_size() for t in batch.tensors())
