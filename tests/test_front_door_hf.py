"""Hugging Face's models and batches: dictionaries, a model's own loss, a function of both; one curvature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import curvescope as cs
from oracles import drawn, relative_error, shaken


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 4, "n_head": 2, "vocab_size": 7, "n_positions": 6}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    module = drawn(lambda: GPT2LMHeadModel(GPT2Config(**sizes, **ids, attn_implementation="eager")))
    return shaken(module, scale=0.2).eval()


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([6, 2, 5, 3, 6])
    mask = (torch.arange(6) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return [
        {"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)
    ]


def counted(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def together(some: list[dict[str, torch.Tensor]]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({key: torch.stack([row[key] for row in some]) for key in some[0]})


def test_every_way_to_say_it_is_one_curvature():
    module, whole = language_model(), together(rows())
    loader: Any = DataLoader(rows(), batch_size=3, collate_fn=together)  # pyright: ignore
    own = lambda model, batch: model(**batch).loss  # noqa: E731
    named = lambda model, batch: model(input_ids=batch.input_ids, labels=batch["labels"]).loss  # noqa: E731
    problems = {
        "dictionary": cs.Problem(module, whole),
        "loader": cs.Problem(module, loader),
        "own loss": cs.Problem(module, whole, loss="own"),
        "own loss, cut": cs.Problem(module, loader, loss="own", terms=counted),
        "function": cs.Problem(module, [whole], loss_fn=own),
        "function, cut": cs.Problem(module, loader, loss_fn=own, terms=counted),
        "function without mask": cs.Problem(module, whole, loss_fn=named),
    }
    first = problems["dictionary"]
    v = torch.randn(first.space().size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, slope, bend = first.loss_value(), first.gradient(), cs.Hessian(first) @ v
    assert value == pytest.approx(float(module(**whole).loss.detach()), rel=1e-6)  # theirs is in float32
    for name, p in problems.items():
        assert p.loss_value() == pytest.approx(value, rel=1e-10), name
        assert relative_error(p.gradient(), slope) < 1e-9, name
        assert relative_error(cs.Hessian(p) @ v, bend) < 1e-9, name
    assert sum("shifted" in note for note in problems["loader"].notes) == 1


def test_an_output_that_is_no_logits_is_chosen():
    module, whole = language_model(), together(rows())
    states = cs.load(module, output=lambda found: found.logits.transpose(1, 2))
    y = torch.cat([whole["labels"][:, 1:], whole["labels"].new_full((5, 1), -100)], dim=1)
    inputs = {"input_ids": whole["input_ids"], "attention_mask": whole["attention_mask"]}
    p = cs.Problem(states, (inputs, y), torch.nn.CrossEntropyLoss())
    assert p.loss_value() == pytest.approx(cs.Problem(module, whole).loss_value(), rel=1e-12)
    u = torch.ones(p.space().size, dtype=torch.float64)
    assert relative_error(cs.GGN(p) @ u, cs.GGN(cs.Problem(module, whole)) @ u) < 1e-9
