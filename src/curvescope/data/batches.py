"""Batches: data that can be read repeatedly in the same order, and that counts its terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.tensors import IGNORED, Tree, leaves, tree_map
from curvescope.data import dict_batches

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Inputs, targets and optional weights of some sequences; axis 0 counts the sequences.

    Targets align with the model's outputs: integers (B, …) of which −100 does not count, or floats of the
    outputs' shape. A custom loss may take a tuple or dictionary of tensors (B, …). No term of the loss
    depends on more than one "sequence": for a loss over pairs, a sequence is one pair. Weights (None = all 1)
    have one number per term, or a shape that broadcasts to that.
    """

    inputs: Inputs
    targets: Tree
    weights: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Length of axis 0."""
        return leaves(self.targets)[0].shape[0]

    def tensors(self) -> list[Tensor]:
        """All tensors of inputs, targets and weights."""
        return [
            *leaves(self.inputs),
            *leaves(self.targets),
            *([] if self.weights is None else [self.weights]),
        ]

    def map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """Apply `move` to each tensor of the batch."""
        weights = None if self.weights is None else move(self.weights)
        return Batch(tree_map(move, self.inputs), tree_map(move, self.targets), weights)

    def __getitem__(self, index: slice) -> Batch:
        return self.map(lambda tensor: tensor[index])

    def share(self, rows: range) -> Batch:
        """Return some sequences; if there are none, one sequence with weight zero."""
        if rows:
            return self[rows.start : rows.stop]
        return Batch(self[:1].inputs, self[:1].targets, torch.zeros(1))


class DataShare(NamedTuple):
    """Description of a rank's part of the data: consecutive sequences."""

    first: int  # number of the first sequence in all data
    total: int  # number of sequences of all data
    empty: bool = False  # True if the part is empty: the batches then hold one sequence that does not count
    cut: tuple[tuple[Batch, slice], ...] = ()  # batches divided over ranks, with this rank's sequences


class Batches(Sequence[Batch]):
    """A re-readable sequence of batches.

    Every product reads the data once. A generator would be empty in the second product, so generators are
    refused.

    Args:
        share: Position in the data of all processes, if these batches are a part of it (`distributed.share`).
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        name: str = "data",
        notes: Sequence[str] = (),
        share: DataShare | None = None,
    ):
        if not isinstance(batches, Sequence):
            raise UsageError(
                f"expected a list of Batch, got {type(batches).__name__}, which can be read only once",
                hint="Batches.from_tensors(x, y, batch_size=8), or Batches.from_loader(loader)",
            )
        checked = map(_checked, batches)
        if not isinstance(batches, list | tuple | Batches):
            checked = map(_copied, checked)  # the batches may share one buffer
        self._batches = tuple(batch for batch in checked if batch.num_sequences)
        self.name, self.notes, self.share = name, tuple(notes), share
        if not self._batches:
            raise UsageError("expected at least one sequence, got none")

    @classmethod
    def from_tensors(
        cls,
        inputs: Inputs,
        targets: Tree,
        weights: Tensor | None = None,
        *,
        batch_size: int | None = None,
        name: str = "tensors",
    ) -> Self:
        """Cut tensors in memory into consecutive batches of `batch_size` sequences (default: one batch)."""
        if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 1):
            raise UsageError(f"expected a batch_size of at least 1, got {batch_size}")
        all_data = _checked(Batch(inputs, _as_targets(targets), weights))
        total = all_data.num_sequences
        step = total if batch_size is None else batch_size
        return cls([all_data[i : i + step] for i in range(0, total, max(step, 1))], name=name)

    @classmethod
    def from_loader(
        cls, loader: Iterable[Any], *, max_bytes: int = 2**30, name: str = "loader", shift: bool = True
    ) -> Self:
        """Read every batch of a DataLoader, or of any finite iterable, once, and store them in this order.

        Items are (inputs, targets[, weights]), or dictionaries with labels, which are shifted like in Hugging
        Face unless `shift` is False; `notes` mentions it. Rows of a `datasets.Dataset` are combined to
        batches. The tensors of a list or tuple are not copied; those of any other loader are, because it may
        write every batch into the same buffer. Raise if the tensors exceed `max_bytes`.
        """
        refuse_iterator(loader)
        batches: list[Batch] = []
        size, any_shifted = 0, False
        for item in _complete_batches(loader):
            batch, shifted = (item, False) if isinstance(item, Batch) else _batch_of(item, shift)
            any_shifted |= shifted
            batches.append(batch if isinstance(loader, list | tuple) else _copied(_checked(batch)))
            size += _bytes(batch)
            if size > max_bytes:
                raise UsageError(
                    f"the loader holds more than max_bytes={max_bytes} ({len(batches)} batches read)",
                    hint="take fewer sequences, or raise max_bytes",
                )
        notes = [*shuffle_notes(loader), *([dict_batches.SHIFTED] if any_shifted else [])]
        return cls(batches, name=name, notes=notes)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        selected = self._batches[index]
        return (
            selected if isinstance(selected, Batch) else Batches(selected, name=self.name, notes=self.notes)
        )

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    @property
    def first_sequence(self) -> int:
        """Number of the first sequence in the data of all processes; 0 without a share."""
        return 0 if self.share is None else self.share.first

    @property
    def num_sequences(self) -> int:
        """Number of sequences in all batches."""
        return sum(batch.num_sequences for batch in self._batches)

    @property
    def num_terms(self) -> int:
        """Number of counted targets (integers other than −100), or of sequences for other kinds of targets.

        A loss may weigh its terms, so products are divided by `Problem.num_terms` instead.
        """
        return sum(map(_num_terms, self._batches))

    def __repr__(self) -> str:
        counts = f"{len(self)} batches, {self.num_sequences} sequences, {self.num_terms} terms"
        return f"Batches({self.name!r}: {counts})"


def as_batches(data: Any, *, shift: bool = True) -> Batches:
    """Convert data to Batches: a DataLoader or list of pairs or dictionaries, or one pair or dictionary.

    Labels in dictionaries are shifted by one position unless `shift` is False.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, Mapping):
        return Batches.from_loader([data], name="tensors", shift=shift)
    if isinstance(data, list) and len(data) in (2, 3) and all(isinstance(t, Tensor) for t in data):
        return Batches.from_tensors(*data)  # one item of a DataLoader
    if isinstance(data, tuple) and len(data) in (2, 3) and not all(map(dict_batches.has_labels, data)):
        inputs, targets = data[:2]
        if isinstance(inputs, Tensor | Mapping) or isinstance(targets, Tensor):
            return Batches.from_tensors(*data)
    if isinstance(data, Iterable):
        return Batches.from_loader(data, shift=shift)
    raise UsageError(
        f"expected Batches, (inputs, targets) or a DataLoader, got {type(data).__name__}",
        hint="cs.Batches.from_tensors(x, y, batch_size=8), or DataLoader(dataset, batch_size=8)",
    )


def _checked(batch: Batch) -> Batch:
    """Check a batch, and copy inference tensors, which autograd cannot save."""
    if not isinstance(batch, Batch):
        raise UsageError(f"expected a Batch, got {type(batch).__name__}")
    check_arrays(batch.tensors())
    check_lengths(leaves(batch.inputs), leaves(batch.targets))
    if batch.weights is not None:
        check_weights(batch.weights, batch.num_sequences)
    is_usable = not any(t.is_inference() for t in batch.tensors())
    return batch if is_usable and not isinstance(batch.targets, list) else batch.map(usable)


def _complete_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's items; single rows given as dictionaries are combined to batches."""
    rows: list[dict_batches.Row] = []
    for item in loader:
        row = dict_batches.row_of(item) if isinstance(item, Mapping) else item
        if not isinstance(row, dict) or not dict_batches.is_single(row):
            yield row
            continue
        rows.append({key: value.clone() for key, value in row.items()})  # the rows may share one buffer
        if len(rows) == dict_batches.ROWS:
            yield dict_batches.combine_rows(rows)
            rows = []
    if rows:
        yield dict_batches.combine_rows(rows)


def _batch_of(item: Any, shift: bool) -> tuple[Batch, bool]:
    """Return the batch of a loader's item, and True if its labels were shifted."""
    if isinstance(item, dict):
        inputs, targets, shifted = dict_batches.inputs_and_targets(item, shift=shift)
        return _checked(Batch(inputs, targets)), shifted
    if isinstance(item, list | tuple) and len(item) in (2, 3):
        return _checked(Batch(*item)), False
    raise UsageError(
        f"expected items (inputs, targets) or (inputs, targets, weights) from the loader, "
        f"got a {type(item).__name__}"
    )


def _as_targets(targets: Any) -> Tree:
    """Return a tree of tensors unchanged, and convert numbers and arrays to a tensor."""
    if isinstance(targets, Mapping | tuple | list) and any(isinstance(t, Tensor) for t in leaves(targets)):
        return targets
    try:
        return torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"expected targets as tensors, got a {type(targets).__name__}") from error


def _copied(batch: Batch) -> Batch:
    return batch.map(lambda tensor: tensor.detach().clone())


def _num_terms(batch: Batch) -> int:
    y = batch.targets
    if not isinstance(y, Tensor) or y.is_floating_point():
        return batch.num_sequences
    return int((y.long() != IGNORED).sum())  # as a byte, −100 is 156


def _bytes(batch: Batch) -> int:
    return sum(t.numel() * t.element_size() for t in batch.tensors())


SHUFFLED = "the loader shuffles: its batches are read once and stored in this order"
DRAWN = (
    "the loader draws new batches in every reading: they are read once and stored, including their random "
    "augmentation"
)


def check_arrays(items: Sequence[Any]) -> None:
    """Raise unless all are dense tensors with entries."""
    for item in items:
        if not isinstance(item, Tensor):
            raise UsageError(
                f"expected inputs, targets and weights as tensors, got a {type(item).__name__}",
                hint="torch.as_tensor(x) makes one",
            )
        if item.layout is not torch.strided or item.is_nested or item.is_quantized or item.is_meta:
            layouts = {"nested": item.is_nested, "meta": item.is_meta, "quantized": item.is_quantized}
            kind = next((name for name, it_is in layouts.items() if it_is), str(item.layout))
            raise UsageError(
                f"expected dense tensors, got a {kind.removeprefix('torch.')} one",
                hint="x.to_dense(), or padding, makes one",
            )


def check_lengths(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Raise unless all have the same number of sequences."""
    if not inputs or not targets:
        raise ShapeError(f"expected inputs and targets, got no {'targets' if inputs else 'inputs'}")
    lengths = {t.shape[0] if t.dim() else -1 for t in (*inputs, *targets)}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in (*inputs, *targets))
        raise ShapeError(
            f"expected inputs and targets with the same number of sequences, got shapes {shapes}",
            hint="axis 0 of all tensors of a batch counts sequences; loss_fn takes batches of any kind",
        )


def check_weights(weights: Tensor, num_sequences: int) -> None:
    """Raise unless the weights are finite, not negative, and at least one per sequence."""
    if weights.shape[:1] != (num_sequences,):
        raise ShapeError(
            f"expected one weight per term, got shape {tuple(weights.shape)} for {num_sequences} sequences"
        )
    if weights.is_complex() or not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise UsageError("expected weights that are real, finite and not negative")


def usable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is an inference tensor, which autograd cannot save."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def refuse_iterator(data: Any) -> None:
    """Raise for data that can be read only once."""
    if isinstance(data, Iterator):
        raise UsageError(
            f"expected a DataLoader or a list of pairs, got a one-pass {type(data).__name__}",
            hint="pass the loader itself, or list(iterator)",
        )


def shuffle_notes(loader: Any) -> list[str]:
    """Return the notes on a loader that has been read once."""
    if shuffles(loader):
        return [SHUFFLED]
    return [DRAWN] if isinstance(loader, DataLoader) and _redraws(loader) else []


def shuffles(loader: Any) -> bool:
    """Return True if a DataLoader shuffles its items in every reading."""
    kinds = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
    return isinstance(getattr(loader, "sampler", None), kinds)


def _redraws(loader: DataLoader[Any]) -> bool:
    """Return True if the first batch differs between two readings; torch's random state is restored."""
    with torch.random.fork_rng(devices=[]):
        first_reading = [_copied_leaf(x) for x in leaves(next(iter(loader), ()))]
        second = leaves(next(iter(loader), ()))
    return len(first_reading) != len(second) or not all(map(_entries_equal, first_reading, second))


def _copied_leaf(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _entries_equal(a: Any, b: Any) -> bool:
    """Return True if two entries have the same numbers; entries that are not tensors are not compared."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return torch.equal(a, b) or (a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()))
