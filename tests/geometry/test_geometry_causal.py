"""Directions tested causally: exact sums of logits, interventions by hand, predictions to second order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trajectory_models import model_of

import adapters_cases as others
import curvescope as cs
from curvescope import geometry as g
from curvescope.geometry.causal.steering import ablation
from curvescope.geometry.roles import weight
from oracles import transformer
from selection import some

FAMILIES = ["gpt2", "llama", "gemma", "gpt_neox", "opt", "qwen3"]


def ids(V: int = 5, B: int = 3, T: int = 4) -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))


def zoo(**more: Any) -> Any:
    return transformer(n_layers=2, **more)


def problem(**more: Any) -> cs.Problem:
    tokens = ids(T=5)
    return cs.Problem(zoo(**more), (tokens[:, :-1], tokens[:, 1:]))


# --------------------------------------------------------------------------------------------- attribution


@pytest.mark.parametrize(
    "settings",
    [
        {"bias_u": True},
        {"norm_kind": "rmsnorm", "activation": "swiglu", "n_kv_heads": 1, "tied": True},
        {"residual_scale": 0.6, "d_ff": 0},
        {"norm": "none", "bias_u": True},
        {"norm_affine": False},
    ],
)
@pytest.mark.parametrize("centered", [True, False])
def test_parts_add_up_to_the_logits_of_the_zoo(settings: dict[str, Any], centered: bool):
    model = cs.load(zoo(**settings))
    x, y = ids(), ids().flip(0)
    y[0, 1] = -100
    found = g.logit_attribution(model, x, y, centered=centered)
    z = model.evaluate(x)
    z = z - z.mean(-1, keepdim=True) if centered else z
    truth = [float(z[n, t, y[n, t]]) for n, t in zip(found.sequence, found.position, strict=True)]
    assert len(truth) == 11
    np.testing.assert_allclose(found.values.sum(0), truth, atol=1e-10)
    np.testing.assert_allclose(found.logits, truth, atol=1e-10)
    assert found.error < 1e-10


@pytest.mark.parametrize("name", some(FAMILIES, 4))
def test_parts_add_up_to_the_logits_of_families(name: str):
    pytest.importorskip("transformers")
    model = others.loaded(name)
    x, y = others.data(name)
    found = g.logit_attribution(model, x, y)
    assert found.error < 1e-10
    assert found.values.shape[1] == int((y >= 0).sum())


def test_parts_of_transformer_lens():
    lens = pytest.importorskip("transformer_lens")
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 10, "d_vocab": 11, "n_ctx": 8}
    config = lens.HookedTransformerConfig(**sizes, act_fn="gelu", seed=0, device="cpu", dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        module = others.shaken(lens.HookedTransformer(config)).eval()
    x, y = others.data("lens")
    found = g.logit_attribution(cs.load(module, dtype="float64"), x, y)
    assert found.error < 1e-10
    _, cache = module.run_with_cache(x)  # their own decomposition of the same stream
    parts, names = cache.decompose_resid(return_labels=True)
    theirs = (cache.apply_ln_to_stack(parts, layer=-1) * module.ln_final.w).detach()  # they leave γ out
    U = module.W_U.detach() - module.W_U.detach().mean(1, keepdim=True)
    direct = torch.einsum("cbtd,dv->cbtv", theirs, U)[names.index("1_mlp_out")]
    ours = found.values[found.parts.index("L1.ff")]
    where = (found.sequence, found.position, found.ids)
    np.testing.assert_allclose(ours, direct[where].numpy(), atol=1e-10)


def test_a_part_is_what_it_would_be_by_hand():
    module = zoo()
    model = cs.load(module)
    x = ids()
    found = g.logit_attribution(model, x)
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        module(x, record=seen.__setitem__)
        last = cs.Problem(model, (x, x.flip(0))).activations(cs.Batch(x, x), "L1.out")["L1.out"]
        head = seen["L1.attn.heads"][..., 2:] @ module.L1.W_O[2:]
        sigma = last.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
        U = module.U - module.U.mean(1, keepdim=True)
        z = (head - head.mean(-1, keepdim=True)) / sigma * module.ln_f.g @ U
    truth = [float(z[n, t, x[n, t + 1]]) for n, t in zip(found.sequence, found.position, strict=True)]
    np.testing.assert_allclose(found.values[found.parts.index("L1.h1")], truth, atol=1e-12)
    assert (found.position < 3).all()  # nothing comes after the last token


@pytest.mark.parametrize("settings", [{"norm": "post"}, {"residual": False}])
def test_what_is_no_sum_is_refused(settings: dict[str, Any]):
    with pytest.raises(cs.UsageError, match="Transformer"):
        g.logit_attribution(cs.load(zoo(**settings)), ids())


def test_logits_that_are_capped_are_refused():
    pytest.importorskip("transformers")
    with pytest.raises(cs.CurvescopeError, match="logits are not"):
        g.logit_attribution(model_of("gemma2"), others.data("gemma2")[0])


# ----------------------------------------------------------------------------------------------- steering


def test_steering_is_the_rest_of_the_model_at_another_state():
    case = problem()
    module: Any = case.model.module
    x, y = case.batches[0].inputs, case.batches[0].targets
    u = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = g.steer(case, "L1.in", u, [0.0, 0.5, -2.0], watch=[2, 4])
    with torch.no_grad():
        start = module.L0(module.embed(x), lambda place, tensor: None)

        def end(shift: Any) -> Tensor:
            return module.ln_f(module.L1(start + shift, lambda place, tensor: None)) @ module.U

        def loss(z: Tensor) -> float:
            return float(torch.nn.functional.cross_entropy(z.flatten(0, 1), y.flatten()))  # pyright: ignore

        for alpha, change, kl, logits in zip(
            found.alphas, found.loss_change, found.kl, found.logit_change, strict=True
        ):
            moved, before = end(alpha * u), end(0)
            assert change == pytest.approx(loss(moved) - loss(before), abs=1e-12)
            p, q = before.log_softmax(-1), moved.log_softmax(-1)
            assert kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-12)
            d = moved - before
            d = d - d.mean(-1, keepdim=True)
            np.testing.assert_allclose(logits, d[..., [2, 4]].mean((0, 1)), atol=1e-12)
    assert found.size == pytest.approx(float(u.norm()))


def test_ablation_takes_a_plane_out():
    case = problem()
    module: Any = case.model.module
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = case.batches[0]
    x = case.activations(batch, "L0.out")["L0.out"]
    for mean in ("zero", "data"):
        delta = ablation(case, "L0.out", rows, mean=mean)(x)
        left = (x + delta) @ rows.T
        expected = x.mean((0, 1)) @ rows.T if mean == "data" else torch.zeros(2, dtype=torch.float64)
        torch.testing.assert_close(left, expected.expand_as(left))
        found = g.ablate(case, "L0.out", rows, mean=mean)
        with torch.no_grad():
            z = module.ln_f(module.L1(x + delta, lambda place, tensor: None)) @ module.U
            loss = torch.nn.functional.cross_entropy(z.flatten(0, 1), batch.targets.flatten())
        assert found.loss + found.loss_change[0] == pytest.approx(float(loss), abs=1e-12)


@pytest.mark.parametrize("at", some(["L0.mid", "L1.h0.out", "embed", "final"], 2))
def test_the_second_order_is_right_to_the_third(at: str):
    case = problem()
    H = cs.ActivationHessian(case, at)
    u = torch.randn(H.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    v = u.repeat(len(H.tokens))
    slope, bend = float(H.gradient() @ v), float(v @ (H @ v))
    alphas = np.array([0.001, 0.002])
    found = g.steer(case, at, u, alphas.tolist()).loss_change
    rest = np.abs(found - slope * alphas - bend * alphas**2 / 2)
    assert rest[1] / rest[0] == pytest.approx(8, rel=0.25)
    assert rest[0] < 0.2 * abs(bend) * alphas[0] ** 2


# ---------------------------------------------------------------------------------------------- directions


@pytest.mark.parametrize("name", ["pre", "gpt2", "llama", "gpt_neox", "bert"])
def test_directions_of_a_layer(name: str):
    if name != "pre":
        pytest.importorskip("transformers")
    model = model_of(name)
    found = g.layer_directions(model, 1, num=2)
    kinds = {direction.kind for direction in found}
    assert kinds == {"vo", "query", "key", "ff out", "ff in"}
    for direction in found:
        assert float(direction.vector.norm()) == pytest.approx(1, abs=1e-9)
    out = next(d for d in found if d.kind == "ff out" and d.rank == 0)
    W_2 = weight(model, "L1.W_2")
    assert W_2 is not None
    assert out.singular_value == pytest.approx(float(torch.linalg.matrix_norm(W_2.double(), 2)))
    assert float((W_2.double() @ out.vector).norm()) == pytest.approx(out.singular_value)


def test_a_planted_direction_is_decoded_as_its_token():
    module = zoo(d_model=8, n_heads=2, d_ff=4, vocab_size=11)
    model = cs.load(module)
    with torch.no_grad():
        u = module.U - module.U.mean(1, keepdim=True)
        rows = u.T * module.ln_f.g
        rows = rows - rows.mean(1, keepdim=True)
    decode = partial(g.decode_at, model, k=1)
    assert decode("L1.mid", rows[7:8]).ids[0, 0, 0] == 7
    assert decode("L1.out", -rows[3:4]).ids[0, 1, 0] == 3
    assert decode("final", u.T[5:6]).ids[0, 0, 0] == 5
    through = torch.linalg.lstsq(module.L1.W_O[:4].detach().T, rows[2].detach()[:, None]).solution.T
    scores = through @ module.L1.W_O[:4].detach() @ rows.T.detach()
    assert decode("L1.h0.out", through).ids[0, 0, 0] == int(scores.argmax())
    with pytest.raises(cs.UsageError, match="directions"):
        decode("L1.mid", rows[:1, :3])


def test_bad_input():
    case = problem()
    with pytest.raises(cs.UsageError, match="direction"):
        g.steer(case, "L0.mid", torch.zeros(3))
    with pytest.raises(cs.UsageError, match="mean"):
        g.ablate(case, "L0.mid", torch.ones(4), mean="median")  # pyright: ignore[reportArgumentType]
