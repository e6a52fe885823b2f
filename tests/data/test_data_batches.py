"""Batches can be read again, and say at once what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

import curvescope as cs
from curvescope.data.batches import as_batches

X, Y = torch.arange(12).view(6, 2), torch.arange(12).view(6, 2) % 5


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), size=st.integers(1, 12))
def test_tensors_are_cut_in_order(n: int, size: int):
    x, y, w = torch.arange(n), torch.arange(n) + 100, torch.arange(n) * 1.0
    batches = cs.Batches.from_tensors(x, y, w, batch_size=size)
    assert [b.num_sequences for b in batches] == [size] * (n // size) + [n % size] * (n % size > 0)
    for attribute, whole in (("inputs", x), ("targets", y), ("weights", w)):
        assert torch.equal(torch.cat([getattr(b, attribute) for b in batches]), whole)
    assert batches.num_sequences == n


def test_read_twice_is_read_the_same():
    batches = cs.Batches.from_tensors(X, Y, batch_size=4)
    assert len(batches) == 2
    for _ in range(2):
        assert [b.inputs.tolist() for b in batches] == [X[:4].tolist(), X[4:].tolist()]
    assert torch.equal(batches[1].targets, Y[4:])
    part = batches[:1]
    assert isinstance(part, cs.Batches)
    assert part.num_sequences == 4
    assert len(cs.Batches.from_tensors(X, Y)) == 1


def test_terms_are_counted_targets_or_sequences():
    y = Y.clone()
    y[0] = -100
    assert cs.Batches.from_tensors(X, y).num_terms == 10
    assert cs.Batches.from_tensors(X, Y.double()).num_terms == 6
    assert (
        repr(cs.Batches.from_tensors(X, y, batch_size=4, name="n"))
        == "Batches('n': 2 batches, 6 sequences, 10 terms)"
    )


def test_named_inputs_are_cut_together():
    batches = cs.Batches.from_tensors({"ids": X, "mask": X + 1}, Y, batch_size=4)
    assert torch.equal(batches[1].inputs["mask"], X[4:] + 1)
    moved = batches[0].map(lambda t: t.double())
    assert moved.inputs["ids"].dtype == moved.targets.dtype == torch.float64
    assert moved.weights is None


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X, Y, torch.ones(6)),
        [(X[:4], Y[:4]), (X[4:], Y[4:])],
        ((X[:4], Y[:4]), (X[4:], Y[4:])),
        [[X[:4], Y[:4]], (X[4:], Y[4:], torch.ones(2))],
        [cs.Batch(X, Y)],
        DataLoader(TensorDataset(X, Y), batch_size=4),
    ],
)
def test_what_counts_as_data(data):
    batches = as_batches(data)
    assert torch.equal(torch.cat([b.inputs for b in batches]), X)
    assert torch.equal(torch.cat([b.targets for b in batches]), Y)
    assert as_batches(batches) is batches


def test_empty_batches_are_dropped():
    batches = cs.Batches([cs.Batch(X[:0], Y[:0]), cs.Batch(X, Y)])
    assert len(batches) == 1


def test_a_loader_is_kept_up_to_a_size():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    assert len(cs.Batches.from_loader(loader, max_bytes=192)) == 3
    with pytest.raises(cs.UsageError, match=r"more than max_bytes=191 \(3 batches read\)"):
        cs.Batches.from_loader(loader, max_bytes=191)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.Batches(b for b in [cs.Batch(X, Y)]), "got generator, which can be read only once"),
        (lambda: cs.Batches([]), "expected at least one sequence, got none"),
        (lambda: cs.Batches([cs.Batch(X[:0], Y[:0])]), "expected at least one sequence, got none"),
        (lambda: cs.Batches.from_tensors(X[:0], Y[:0]), "expected at least one sequence, got none"),
        (lambda: cs.Batches.from_tensors(X, Y, batch_size=0), "batch_size of at least 1, got 0"),
        (
            lambda: cs.Batches.from_tensors(X, Y[:5]),
            r"same number of sequences, got shapes \(6, 2\), \(5, 2\)",
        ),
        (lambda: cs.Batches.from_tensors({"a": X, "b": X[:1]}, Y), r"same number of sequences"),
        (
            lambda: cs.Batches.from_tensors(X, torch.tensor(3)),
            r"same number of sequences, got shapes \(6, 2\), \(\)",
        ),
        (lambda: cs.Batches.from_tensors(X, Y, torch.ones(5)), r"one weight per term, got shape \(5,\)"),
        (lambda: cs.Batches.from_tensors(X, Y, -torch.ones(6)), "expected weights that are.* not negative"),
        (lambda: cs.Batches.from_loader(iter([(X, Y)])), "got a one-pass list_iterator"),
        (lambda: as_batches(pair for pair in [(X, Y)]), "got a one-pass generator"),
        (lambda: as_batches([X]), r"expected items \(inputs, targets\).*got a Tensor"),
        (lambda: as_batches([(X, Y, Y, Y)]), r"expected items \(inputs, targets\)"),
        (lambda: as_batches(3), r"expected Batches, \(inputs, targets\) or a DataLoader, got int"),
    ],
)
def test_wrong_data_is_refused(make, message: str):
    with pytest.raises(cs.UsageError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: cs.Batches([(X, Y)]),
        lambda: cs.Batches([cs.Batch(X, Y.tolist())]),
        lambda: cs.Batches([cs.Batch(X, torch.tensor(3))]),
        lambda: cs.Batches.from_tensors(X.numpy(), Y),
        lambda: cs.Batches.from_tensors(X.tolist(), Y),
        lambda: cs.Batches.from_tensors(X, Y, [1.0] * 6),
        lambda: as_batches([(X, Y.numpy())]),
    ],
    ids=["pairs", "list-targets", "no-axis", "numpy-inputs", "list-inputs", "list-weights", "numpy-targets"],
)
def test_data_that_are_no_tensors_are_refused(make):
    with pytest.raises(cs.UsageError, match=r"expected .*, got"):
        make()


@pytest.mark.parametrize(
    "weights",
    [torch.ones(6, 3), torch.ones(6, 2, 2), torch.full((6,), torch.nan), torch.full((6,), torch.inf)],
)
def test_weights_that_do_not_fit_are_refused(weights: torch.Tensor):
    model = cs.load(cs.TransformerConfig(n_layers=1, d_model=4, n_heads=1, n_ctx=2, vocab_size=12))
    with pytest.raises(cs.UsageError, match="weight"):
        cs.Problem(model, (X, Y, weights))


class OneBuffer:
    """A loader that writes every batch into the same tensors."""

    def __init__(self) -> None:
        self.x, self.y = torch.empty(2, 2, dtype=torch.long), torch.empty(2, 2, dtype=torch.long)

    def __iter__(self):
        for i in range(0, 6, 2):
            self.x.copy_(X[i : i + 2])
            self.y.copy_(Y[i : i + 2])
            yield self.x, self.y


class OneBufferSequence(OneBuffer, Sequence):
    """The same as a sequence of Batch."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index):
        if not 0 <= index < 3:
            raise IndexError
        x, y = list(zip(range(index + 1), OneBuffer.__iter__(self), strict=False))[-1][1]
        return cs.Batch(x, y)

    __iter__ = Sequence.__iter__


@pytest.mark.parametrize("batches", [as_batches(OneBuffer()), cs.Batches(OneBufferSequence())])
def test_a_loader_that_reuses_its_buffer_is_copied(batches: cs.Batches):
    assert torch.equal(torch.cat([b.inputs for b in batches]), X)
    assert torch.equal(torch.cat([b.targets for b in batches]), Y)


def test_tensors_of_a_list_are_kept_themselves():
    pairs = [(X[:4].clone(), Y[:4].clone())]
    assert as_batches(pairs)[0].targets is pairs[0][1]


def test_data_of_inference_mode_can_be_differentiated():
    with torch.inference_mode():
        x, y, w = X.double(), Y[:, 0] % 3, torch.ones(6)
    module = torch.nn.Linear(2, 3).double()
    hessians = [
        cs.Hessian(cs.Problem(module, data)).to_dense()
        for data in ((x, y, w), (X.double(), Y[:, 0] % 3), DataLoader(TensorDataset(x, y), batch_size=4))
    ]
    torch.testing.assert_close(hessians[0], hessians[1])
    torch.testing.assert_close(hessians[2], hessians[1])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


TREES = {
    "tuple": (Y, Y + 1),
    "list": [Y, Y + 1],
    "named": Pair(Y, Y + 1),
    "dictionary": {"a": Y, "b": {"c": Y + 1}},
}


@pytest.mark.parametrize("targets", TREES.values(), ids=TREES)
@pytest.mark.parametrize("weights", [None, torch.arange(6.0)], ids=["", "weights"])
def test_targets_may_be_a_tree(targets, weights: torch.Tensor | None):
    batches = cs.Batches.from_tensors(X, targets, weights, batch_size=4)
    assert [b.num_sequences for b in batches] == [4, 2]
    assert batches.num_terms == 6
    assert "6 terms" in repr(batches)
    first, second = (torch.cat(leaves) for leaves in zip(*[_leaves(b) for b in batches], strict=True))
    assert torch.equal(first, Y)
    assert torch.equal(second, Y + 1)
    assert len(batches[0].tensors()) == 3 + (weights is not None)
    doubled = batches[0].map(lambda t: 2 * t)
    assert torch.equal(_leaves(doubled)[1], 2 * (Y + 1)[:4])
    assert type(doubled.targets) is (tuple if isinstance(targets, list) else type(targets))


def _leaves(batch: cs.Batch) -> list[torch.Tensor]:
    y = batch.targets
    return [y["a"], y["b"]["c"]] if isinstance(y, dict) else list(y)


def test_a_tree_comes_from_pairs_and_loaders_too():
    class Rows(Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int):
            return X[i], (Y[i], Y[i] + 1)

    for data in ((X, (Y, Y + 1)), [(X, (Y, Y + 1))], DataLoader(Rows(), batch_size=4)):
        batches = as_batches(data)
        assert all(isinstance(b.targets, tuple) for b in batches)
        assert torch.equal(torch.cat([b.targets[1] for b in batches]), Y + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_batches((X, None)), "expected targets as tensors, got a NoneType"),
        (lambda: as_batches((X, "words")), "expected targets as tensors, got a str"),
        (lambda: as_batches((X, (Y, Y[:5]))), "same number of sequences"),
        (lambda: as_batches((X, (Y, None))), "got a NoneType"),
        (lambda: as_batches(({}, Y)), "got no inputs"),
        (lambda: cs.Batches([cs.Batch(X, ())]), "got no targets"),
        (lambda: as_batches((X.to_sparse(), Y)), "expected dense tensors, got a sparse_coo one"),
        (lambda: as_batches((X.to("meta"), Y)), "expected dense tensors, got a meta one"),
        (lambda: as_batches((X, Y, torch.ones(6, dtype=torch.complex64))), "weights that are real"),
        (lambda: as_batches((X, Y, torch.tensor(1.0))), r"one weight per term, got shape \(\)"),
        (lambda: cs.Batches.from_tensors(X, Y, batch_size=2.0), "batch_size of at least 1, got 2.0"),
    ],
)
def test_odd_data_are_refused_in_one_sentence(make, message: str):
    with pytest.raises(cs.UsageError, match=message):
        make()


def test_a_byte_of_156_is_a_class():
    """−100 and 156 are the same byte."""
    y = torch.tensor([156, 3], dtype=torch.uint8)
    assert cs.Batches.from_tensors(X[:2], y).num_terms == 2
