"""Batches as people have them: dictionaries with labels, loaders and datasets of them, unshifted pairs."""

from __future__ import annotations

import warnings
from collections import UserDict

import pytest
import torch
from torch.utils.data import DataLoader

import curvescope as cs
from curvescope.data.batches import SHUFFLED, as_batches
from curvescope.data.dict_batches import SHIFTED

X = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
SHIFTED_X = torch.tensor([[1, 2, 3, -100], [3, 2, 1, -100]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
SMALL = {"n_layers": 1, "d_model": 4, "n_heads": 1, "n_ctx": 4, "vocab_size": 5}


def zoo(**settings) -> cs.Model:
    return cs.load(cs.TransformerConfig(**{**SMALL, **settings}), dtype="float64")


class FakeDataset:
    """What a datasets.Dataset looks like to one who iterates over it."""

    column_names = ("text", "input_ids", "attention_mask", "labels")

    def __init__(self, rows: list[dict]):
        self.rows = rows

    def set_format(self, *args, **kwargs) -> None:
        raise AssertionError("somebody else's dataset is not changed")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i]

    def __iter__(self):
        return iter(self.rows)


def rows(*lengths: int) -> list[dict]:
    return [
        {"text": "words", "idx": n, "input_ids": list(range(n)), "labels": list(range(n))} for n in lengths
    ]


def whole(item=dict, at=slice(None)) -> dict:
    return item({"input_ids": X[at], "attention_mask": MASK[at], "labels": X[at]})


@pytest.mark.parametrize(
    "data",
    [
        whole(),
        [whole()],
        whole(UserDict),
        DataLoader([whole(at=i) for i in range(2)], batch_size=2),
    ],
    ids=["a dictionary", "a list", "a user's dictionary", "a loader"],
)
def test_labels_are_shifted_as_hugging_face_does(data):
    batches = as_batches(data)
    assert torch.equal(batches[0].targets, SHIFTED_X)
    assert torch.equal(batches[0].inputs["input_ids"], X)
    assert batches.num_terms == 6
    assert batches.notes == (SHIFTED,)
    assert torch.equal(as_batches(data, shift=False)[0].targets, X)


def test_the_loss_is_that_of_the_shifted_outputs():
    model = zoo()
    labels = X.clone()
    labels[1, 3] = -100
    problem = cs.Problem(model, {"input_ids": X, "attention_mask": MASK, "labels": labels})
    z = model.evaluate(X)[:, :-1].flatten(0, 1)
    truth = torch.nn.functional.cross_entropy(z, labels[:, 1:].flatten(), ignore_index=-100)
    assert problem.loss_value() == pytest.approx(float(truth), rel=1e-12)
    assert problem.num_terms == 5
    assert problem.notes == (SHIFTED,)


def test_the_loss_is_transformers_own():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=5, n_positions=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.GPT2LMHeadModel(config).double().eval()
    labels = torch.where(MASK == 1, X, -100)
    given = {"input_ids": X, "attention_mask": MASK, "labels": labels}
    with torch.no_grad():
        truth = float(module(**given).loss)
    assert cs.Problem(module, given).loss_value() == pytest.approx(truth, rel=1e-6)  # it sums in float32
    embedded = {"inputs_embeds": module.transformer.wte(X).detach(), "labels": X}
    with torch.no_grad():
        truth = float(module(**embedded).loss)
    assert cs.Problem(module, embedded).loss_value() == pytest.approx(truth, rel=1e-6)


def test_padding_on_the_left_is_refused_whichever_row_has_it():
    """Eager attention and PyTorch's own differ where a token sees nothing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=7, n_positions=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.GPT2LMHeadModel(config).double().eval()
        for parameter in module.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    problem = cs.Problem(module, given)
    H = cs.Hessian(problem)
    with pytest.raises(cs.CurvescopeError, match="other outputs with attention and options"):
        H @ torch.ones(H.shape[1], dtype=torch.float64)
    for call in (problem.loss_value, problem.gradient):
        with pytest.raises(cs.CurvescopeError, match="padded on the left"):
            call()
    labels = given["labels"].clone()
    labels[1, 2] = -100  # the one that is predicted where nothing is seen
    given = {**given, "labels": labels}
    with torch.no_grad():
        truth = float(module(**given).loss)
    assert cs.Problem(module, given).loss_value() == pytest.approx(truth, rel=1e-6)


def test_only_what_predicts_the_next_token_is_shifted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem = cs.Problem(zoo(causal=False), {"input_ids": X, "labels": X})
    assert torch.equal(problem.batches[0].targets, X)
    assert problem.notes == ()
    classes = as_batches({"input_ids": X, "labels": torch.tensor([0, 1])})
    assert torch.equal(classes[0].targets, torch.tensor([0, 1]))
    assert classes.notes == ()


@pytest.mark.parametrize("make", [FakeDataset, list], ids=["dataset", "list"])
def test_rows_are_padded_and_put_together(make):
    batches = as_batches(make(rows(4, 2, *[3] * 7)))
    assert [b.num_sequences for b in batches] == [8, 1]
    first = batches[0]
    assert first.inputs["input_ids"][1].tolist() == [0, 1, 0, 0]
    assert first.inputs["attention_mask"][1].tolist() == [1, 1, 0, 0]
    assert first.targets[1].tolist() == [1, -100, -100, -100]
    assert set(first.inputs) == {"input_ids", "attention_mask"}
    assert batches.num_terms == 3 + 1 + 7 * 2
    one_by_one = cs.Problem(zoo(), [as_batches([row])[0] for row in rows(4, 2)]).loss_value()
    assert cs.Problem(zoo(), make(rows(4, 2))).loss_value() == pytest.approx(one_by_one, rel=1e-12)


def test_rows_that_are_written_into_one_buffer():
    class Reused:
        def __iter__(self):
            row = {
                "input_ids": torch.zeros(2, dtype=torch.int64),
                "labels": torch.zeros(2, dtype=torch.int64),
            }
            for i in range(3):
                row["input_ids"].fill_(i)
                yield row

    assert as_batches(Reused())[0].inputs["input_ids"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_dataset_of_datasets():
    datasets = pytest.importorskip("datasets")
    ours = datasets.Dataset.from_list(rows(4, 2))
    assert torch.equal(as_batches(ours)[0].targets, as_batches(rows(4, 2))[0].targets)


def test_rows_of_images_with_a_label():
    batches = as_batches([{"pixel_values": torch.zeros(1, 2, 2), "label": i} for i in range(3)])
    assert batches[0].inputs["pixel_values"].shape == (3, 1, 2, 2)
    assert batches[0].targets.tolist() == [0, 1, 2]


def test_a_shuffling_loader_is_read_once_and_said_so():
    loader = DataLoader([(x, x.roll(-1)) for x in X.repeat(8, 1)], batch_size=2, shuffle=True)
    batches = as_batches(loader)
    assert batches.notes == (SHUFFLED,)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(batches, batches, strict=True))
    assert as_batches(DataLoader([(x, x) for x in X])).notes == ()


def test_pairs_that_are_not_shifted_are_noticed():
    with pytest.warns(UserWarning, match=r"targets equal the inputs at every position.* ids\[:, 1:\]"):
        cs.Problem(zoo(), (X, X))
    ignored = X.clone()
    ignored[:, 0] = -100
    with pytest.warns(UserWarning, match="targets equal the inputs"):
        cs.Problem(zoo(), cs.Batches.from_tensors(X, ignored, batch_size=1))


@pytest.mark.parametrize(
    ("settings", "pair"),
    [({}, (X, SHIFTED_X)), ({"causal": False}, (X, X)), ({}, (torch.cat([X, X]), torch.cat([X, SHIFTED_X])))],
    ids=["shifted", "both ways", "some of them"],
)
def test_other_pairs_are_not(settings: dict, pair: tuple):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cs.Problem(zoo(**settings), pair)


def test_a_task_for_a_text_model_is_explained():
    model = cs.load("tiny-gpt")
    problem = cs.Problem(model, cs.task_data("sorting", num_sequences=2))
    (note,) = problem.notes
    assert "'sorting' has tokens of its own" in note
    assert not cs.Problem(zoo(vocab_size=64, n_ctx=64), cs.task_data("sorting", num_sequences=2)).notes
