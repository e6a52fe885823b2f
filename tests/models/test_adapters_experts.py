"""Mixtures of experts: every expert a block, in float64, at a choice of experts that is constant."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import curvescope as cs
import mixtures
from adapters_cases import relative
from curvescope.models.model import check_cover
from dense_module import Truth, dense_truth
from selection import most, some

every = pytest.mark.parametrize("name", mixtures.MIXTURES)
first = pytest.mark.parametrize("name", some(list(mixtures.MIXTURES), 1))
PARTS = {"hessian": cs.Hessian, "ggn": cs.GGN, "functional": cs.FunctionalHessian}
EXACT = 1e-12


def problem_of(module: Any, cuts: tuple[int, ...] = (3,), **options: Any) -> cs.Problem:
    x, y = mixtures.tokens()
    data = list(zip(x.split(cuts), y.split(cuts), strict=True))
    return cs.Problem(cs.load(module, **options), data)


def truth_of(module: Any) -> Truth:
    """By the library's own plain forms."""
    x, y = mixtures.tokens()
    plain = copy.deepcopy(module)
    plain.set_attn_implementation("eager")
    plain.set_experts_implementation("eager")

    def logits(values: Any) -> torch.Tensor:
        return torch.func.functional_call(plain, values, (x,), {"use_cache": False}).logits

    return dense_truth(logits, dict(plain.named_parameters()), y)


@cache
def tried(name: str) -> tuple[Any, Truth]:
    module = mixtures.mixture(name)
    return module, truth_of(module)


def check(problem: cs.Problem, truth: Truth, exact: float = EXACT) -> None:
    """Value, gradient, and products with the three matrices."""
    at, V = truth.order(problem.space()), probe(problem)
    assert problem.loss_value() == pytest.approx(truth.value, rel=exact)
    assert relative(problem.gradient(), truth.gradient[at]) < exact
    for part, operator in PARTS.items():
        assert relative(operator(problem) @ V, getattr(truth, part)[at][:, at] @ V) < exact, part


def check_alike(problem: cs.Problem, other: cs.Problem) -> None:
    """Value, gradient and products of one model, loaded twice and cut differently."""
    V = probe(problem)
    assert problem.loss_value() == pytest.approx(other.loss_value(), rel=EXACT)
    assert relative(problem.gradient(), other.gradient()) < EXACT
    for part, operator in PARTS.items():
        assert relative(operator(problem) @ V, operator(other) @ V) < EXACT, part


def probe(problem: cs.Problem) -> torch.Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.randn(problem.space().size, 3, generator=source, dtype=torch.float64)


@pytest.mark.parametrize("name", most(list(mixtures.MIXTURES), but=["qwen3_moe"]))
def test_value_gradient_and_matrices_are_the_dense_ones(name: str):
    module, truth = tried(name)
    check(problem_of(module), truth)
    assert module.config._experts_implementation == "grouped_mm"  # as it was


@first
def test_batching_and_changed_parameters(name: str):
    module, truth = copy.deepcopy(tried(name)[0]), tried(name)[1]
    problem = problem_of(module, (1, 2))
    check(problem, truth)
    with torch.no_grad():
        module.model.layers[0].mlp.experts.down_proj.mul_(1.5)
        module.model.layers[0].mlp.gate.weight[0] += 0.2
    assert problem.loss_value() != pytest.approx(truth.value, rel=1e-6)
    check_alike(problem, problem_of(copy.deepcopy(module)))


@first
def test_the_product_is_a_difference_of_gradients(name: str):
    problem = problem_of(tried(name)[0])
    v, step = probe(problem)[:, 0], 1e-5
    theta = problem.space().gather(dict(problem.named_parameters()))
    plus, minus = (problem.at(theta + sign * step * v).gradient() for sign in (1, -1))
    assert relative((plus - minus) / (2 * step), cs.Hessian(problem) @ v) < 1e-5


@every
def test_blocks_cover_every_parameter_once_and_are_the_matrices_of_the_formula(name: str):
    module = tried(name)[0]
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    W = {n: b.take(model.get_parameter(b.parameter)).detach() for n, b in model.blocks.items()}
    X = torch.randn(5, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def gated(front: str) -> torch.Tensor:
        hidden = torch.nn.functional.silu(X @ W[f"{front}W_g"]) * (X @ W[f"{front}W_u"])
        return hidden @ W[f"{front}W_2"]

    p = (X @ W["L0.W_router"]).softmax(-1)
    kept = p * (p >= p.topk(2).values[:, 1:])
    if name != "qwen2_moe":
        kept = kept / kept.sum(1, keepdim=True)
    want = sum(kept[:, e, None] * gated(f"L0.expert{e}.") for e in range(3))
    if name == "qwen2_moe":
        want = want + torch.sigmoid(X @ W["L0.W_shared"]) * gated("L0.shared.")
    plain = copy.deepcopy(module)
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        assert relative(plain.model.layers[0].mlp(X[None])[0], want) < 1e-6  # the router is in float32
    assert model.facts["n_experts"] == 3
    assert model.facts["experts_per_token"] == 2
    if name == "qwen3_moe":
        assert {"L1.W_g", "L1.W_u", "L1.W_2"} <= set(model.blocks)  # a layer without experts


def test_experts_are_chosen_by_globs():
    problem = problem_of(tried("mixtral")[0])
    assert [b.name for b in problem.space("L0.expert1.*")] == [f"L0.expert1.W_{r}" for r in "gu2"]
    assert len(problem.space("*.expert*.W_2")) == 3
    assert len(problem.space(tried("mixtral")[0].model.layers[0].mlp.experts)) == 9


@pytest.mark.parametrize("name", some(["qwen2_moe", "mixtral"], 1))
def test_sources_add_up(name: str):
    problem = problem_of(tried(name)[0])
    sources, v = cs.FunctionalSources(problem), probe(problem)[:, :1]
    assert list(sources) == ["L0.attention", "L0.ffn", "L0.ln1", "L0.ln2", "ln_f", "rest"]
    assert relative(sum(sources.products(v).values()), cs.FunctionalHessian(problem) @ v) < 1e-10  # pyright: ignore


@first
def test_folders_and_float32(name: str, tmp_path: Path):
    module, truth = tried(name)
    module.save_pretrained(tmp_path / "saved")
    check(problem_of(tmp_path / "saved", dtype="float64"), truth, 1e-6)  # its rotations are in float32
    single = problem_of(copy.deepcopy(module).float())
    H = cs.Hessian(single)
    at, v = truth.order(single.space()), torch.ones(H.shape[0])
    assert relative((H @ v).double(), truth.hessian[at][:, at] @ v.double()) < 1e-4


def test_in_float32_grouped_experts_are_compared_with_plain_ones():
    module = mixtures.mixture("mixtral", intermediate_size=4).float()  # they need multiples of 16 bytes
    note = cs.load(module).notes[0]
    assert note.endswith("attention is eager, not sdpa and experts are eager, not grouped_mm")
    assert "experts" not in cs.load(mixtures.t5()).notes[0]


# --------------------------------------------------------------------------------------------- routing


def held(module: Any) -> Any:
    """A copy whose routers give what they give at its parameters, wherever these go."""
    plain = copy.deepcopy(module)
    plain.set_attn_implementation("eager")
    plain.set_experts_implementation("eager")
    kept: dict[str, Any] = {}
    for name, part in plain.named_modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(
                lambda m, x, y, name=name: kept.setdefault(name, tuple(t.detach() for t in y))
            )
    return plain


@pytest.mark.parametrize("name", some(["qwen2_moe", "mixtral", "qwen3_moe"], 1))
def test_frozen_routing_is_the_hessian_at_constant_weights(name: str):
    module, truth = tried(name)
    problem = problem_of(module, routing="frozen")
    assert problem.model.facts["routing"] == "frozen"
    assert "routing='frozen'" in problem.model.notes[-1]
    assert problem.loss_value() == pytest.approx(truth.value, rel=EXACT)
    x, y = mixtures.tokens()
    plain = held(module)

    def logits(values: Any) -> torch.Tensor:
        return torch.func.functional_call(plain, values, (x,), {"use_cache": False}).logits

    constant = dense_truth(logits, dict(plain.named_parameters()), y)
    check(problem, constant)
    for operator in PARTS.values():
        assert not (operator(problem).block("L*.W_router", "*") @ probe(problem)).any()
    assert relative(constant.hessian, truth.hessian) > 1e-2
    back = cs.load(problem.model, routing="differentiable")
    again = cs.Problem(back, problem.batches)
    assert relative(cs.Hessian(again) @ probe(again), cs.Hessian(problem_of(module)) @ probe(again)) < EXACT
    assert sum("a mixture of" in note for note in back.notes) == 1


def test_routing_of_what_has_none_is_refused():
    with pytest.raises(cs.UsageError, match="expected a mixture of experts with known routers"):
        cs.load("tiny-gpt", routing="frozen")
    with pytest.raises(cs.UsageError, match="expected routing 'differentiable' or 'frozen', got 'soft'"):
        cs.load(tried("mixtral")[0], routing="soft")  # pyright: ignore[reportArgumentType]


def test_experts_have_no_kronecker_factors_whatever_the_order_of_the_data():
    x, y = mixtures.tokens()
    module = mixtures.mixture("mixtral")
    for order in ([0, 1, 2], [2, 1, 0]):
        problem = cs.Problem(module, (x[order], y[order]))
        K = cs.KFAC(problem, "L0.expert*", "L0.W_O", kind="empirical")
        assert K.shape[0] == 16
        assert len(K.left_out) == 9
        assert all("some of the tokens" in why for why in K.left_out.values())
