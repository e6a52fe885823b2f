"""T5: an encoder and a decoder, tied embeddings, biases by relative position, labels shifted to the right."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")

import curvescope as cs
import mixtures
from adapters_cases import relative
from curvescope.models.model import check_cover
from dense_module import Truth, dense_truth
from selection import some

PARTS = {"hessian": cs.Hessian, "ggn": cs.GGN, "functional": cs.FunctionalHessian}
EXACT = 1e-12


@cache
def tried(kind: str) -> tuple[Any, Truth]:
    module = mixtures.t5(kind)
    return module, truth_of(module)


def truth_of(module: Any) -> Truth:
    """By the library's own plain attention, with labels given to the module itself."""
    plain, batch = copy.deepcopy(module), mixtures.pairs()
    plain.set_attn_implementation("eager")

    def logits(values: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # some releases of transformers know no eager attention for T5
            return torch.func.functional_call(plain, values, (), {"use_cache": False, **batch}).logits

    return dense_truth(logits, dict(plain.named_parameters()), batch["labels"])


def problem_of(module: Any, cuts: tuple[int, ...] = (3,), **options: Any) -> cs.Problem:
    parts = {key: tensor.split(cuts) for key, tensor in mixtures.pairs().items()}
    data = [{key: parts[key][i] for key in parts} for i in range(len(cuts))]
    return cs.Problem(cs.load(module, **options), data)


def probe(problem: cs.Problem) -> Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.randn(problem.space().size, 3, generator=source, dtype=torch.float64)


def check(problem: cs.Problem, truth: Truth) -> None:
    """Value, gradient, and products with the three matrices."""
    at, V = truth.order(problem.space()), probe(problem)
    assert problem.loss_value() == pytest.approx(truth.value, rel=EXACT)
    assert relative(problem.gradient(), truth.gradient[at]) < EXACT
    for part, operator in PARTS.items():
        assert relative(operator(problem) @ V, getattr(truth, part)[at][:, at] @ V) < EXACT, part


def check_alike(problem: cs.Problem, other: cs.Problem) -> None:
    """Value, gradient and products of one model, loaded twice and cut differently."""
    V = probe(problem)
    assert problem.loss_value() == pytest.approx(other.loss_value(), rel=EXACT)
    assert relative(problem.gradient(), other.gradient()) < EXACT
    for part, operator in PARTS.items():
        assert relative(operator(problem) @ V, operator(other) @ V) < EXACT, part


@pytest.mark.parametrize("kind", some(["gated-gelu", "relu"], 1))
def test_value_gradient_and_products_are_the_dense_ones(kind: str):
    module, truth = tried(kind)
    problem = problem_of(module)
    check(problem, truth)
    with torch.no_grad():
        assert float(module(**mixtures.pairs()).loss) == pytest.approx(truth.value, rel=1e-6)
    assert module.config._attn_implementation == "sdpa"
    assert any("shifted to the right" in note for note in problem.notes)


@pytest.mark.parametrize("kind", some(["gated-gelu", "relu"], 1))
def test_batching_and_changed_parameters(kind: str):
    module, truth = copy.deepcopy(tried(kind)[0]), tried(kind)[1]
    problem = problem_of(module, (1, 2))
    check(problem, truth)
    with torch.no_grad():
        module.decoder.block[0].layer[1].EncDecAttention.q.weight.mul_(1.5)
        module.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight[0] += 0.3
    assert problem.loss_value() != pytest.approx(truth.value, rel=1e-6)
    check_alike(problem, problem_of(copy.deepcopy(module)))


def test_the_product_is_a_difference_of_gradients():
    problem = problem_of(tried("gated-gelu")[0])
    v, step = probe(problem)[:, 0], 1e-5
    theta = problem.space().gather(dict(problem.named_parameters()))
    plus, minus = (problem.at(theta + sign * step * v).gradient() for sign in (1, -1))
    assert relative((plus - minus) / (2 * step), cs.Hessian(problem) @ v) < 1e-5


def test_blocks():
    module = tried("gated-gelu")[0]
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    d, inner = 4, 4
    cross = {n: b.shape for n, b in model.blocks.items() if n.startswith("L2.cross")}
    assert cross == {f"L2.cross_W_{r}": (d, inner) if r != "O" else (inner, d) for r in "QKVO"}
    assert {n for n in model.blocks if n.endswith("P_rel")} == {"L0.P_rel", "L1.P_rel"}
    assert model.heads["L1.h1.cross_W_V"].shape == (d, 2)
    assert {"E", "ln_enc.g", "ln_f.g", "L1.ln_cross.g"} <= set(model.blocks)
    assert sum("is shared.weight" in note for note in model.notes) == 3
    assert any(note.startswith("L1 is the first layer of the decoder") for note in model.notes)
    assert {b.name for b in model.space("encoder.*")} == {n for n in model.blocks if n.startswith("L0.")} | {
        "ln_enc.g"
    }
    Q = module.decoder.block[1].layer[1].EncDecAttention.q.weight
    assert torch.equal(
        model.blocks["L2.cross_W_Q"].take(model.get_parameter(model.blocks["L2.cross_W_Q"].parameter)), Q.T
    )


def test_sources_add_up():
    problem = problem_of(tried("gated-gelu")[0])
    sources, v = cs.FunctionalSources(problem), probe(problem)[:, :1]
    assert {"L0.attention", "L1.cross", "L2.ffn", "L1.ln_cross", "ln_enc", "ln_f"} < set(sources)
    assert relative(sum(sources.products(v).values()), cs.FunctionalHessian(problem) @ v) < 1e-10  # pyright: ignore


def test_padding_changes_nothing():
    """Longer inputs that the mask hides, and labels that do not count, leave every number as it is."""
    problem, batch = problem_of(tried("gated-gelu")[0]), mixtures.pairs()
    longer = {
        key: torch.nn.functional.pad(tensor, (0, 2), value=-100 if key == "labels" else 0)
        for key, tensor in batch.items()
    }
    again = cs.Problem(problem.model, longer)
    assert again.loss_value() == pytest.approx(problem.loss_value(), rel=EXACT)
    assert relative(cs.Hessian(again) @ probe(again), cs.Hessian(problem) @ probe(problem)) < EXACT


def test_what_a_decoder_reads_may_be_given():
    module, batch = tried("gated-gelu")[0], mixtures.pairs()
    problem = problem_of(module)
    ids = module.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    given = cs.Problem(module, {**batch, "decoder_input_ids": ids})
    assert given.loss_value() == problem.loss_value()
    assert not any("shifted" in note for note in given.notes)
    pairs = cs.Problem(module, (batch["input_ids"], batch["labels"]))
    unmasked = {key: tensor for key, tensor in batch.items() if key != "attention_mask"}
    assert pairs.loss_value() == pytest.approx(float(module(**unmasked).loss.detach()), rel=1e-6)
    with pytest.raises(cs.UsageError, match=r"expected labels \(B, T\), which a decoder reads"):
        cs.Problem(module, (batch["input_ids"], torch.zeros(3, 4, 7).double()), loss="mse")
    with pytest.raises(cs.UsageError, match="cannot make decoder_input_ids from labels: "):
        cs.Problem(mixtures.t5("relu", decoder_start_token_id=None), batch)


def test_folders_and_float32(tmp_path: Path):
    module, truth = tried("gated-gelu")
    module.save_pretrained(tmp_path / "saved")
    check(problem_of(tmp_path / "saved", dtype="float64"), truth)
    single = problem_of(copy.deepcopy(module).float())
    at, v = truth.order(single.space()), torch.ones(single.space().size)
    found = (cs.Hessian(single) @ v).double()
    assert relative(found, truth.hessian[at][:, at] @ v.double()) < 1e-4
