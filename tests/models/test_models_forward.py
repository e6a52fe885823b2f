"""The zoo's forward pass against one written with loops."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

import curvescope as cs
import oracles
from curvescope.core.errors import UsageError
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from oracles import relative_error, transformer


def norm(cfg: cs.TransformerConfig, x: Tensor, params: dict[str, Tensor], name: str) -> Tensor:
    """One vector through a norm."""
    if cfg.norm_kind == "layernorm":
        x = x - x.sum() / len(x)
    y = x / ((x**2).sum() / len(x) + cfg.norm_eps).sqrt()
    y = y * params.get(f"{name}.g", 1.0)
    return y + params.get(f"{name}.b", 0.0)


def activate(kind: str, h: Tensor) -> Tensor:
    if kind == "relu":
        return torch.where(h > 0, h, 0.0)
    if kind == "gelu":
        return h * (1 + torch.erf(h / math.sqrt(2))) / 2
    if kind == "gelu_tanh":
        return h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
    return h if kind == "identity" else h / (1 + torch.exp(-h))


def rotated(vector: Tensor, t: int, base: float) -> Tensor:
    """Dimensions f and f + k/2 as one complex number, turned by t · base^(−2f/k)."""
    half = len(vector) // 2
    out = vector.clone()
    for f in range(half):
        turn = cmath.exp(1j * t * base ** (-2 * f / len(vector)))
        z = complex(vector[f], vector[f + half]) * turn
        out[f], out[f + half] = z.real, z.imag
    return out


def score(cfg, params, layer: str, h: int, xs: list[Tensor], i: int, j: int) -> Tensor:
    k, d = cfg.head_size, cfg.d_model
    if cfg.merged_qk:
        found = xs[i] @ params[f"{layer}.W_QK"][:, h * d : (h + 1) * d] @ xs[j]
    else:
        own = h // (cfg.n_heads // cfg.kv_heads)
        q, key = (
            (xs[t] @ params[f"{layer}.W_{r}"] + params.get(f"{layer}.b_{r}", 0.0))[n * k : (n + 1) * k]
            for t, r, n in ((i, "Q", h), (j, "K", own))
        )
        if cfg.positions == "rope":
            q, key = rotated(q, i, cfg.rope_base), rotated(key, j, cfg.rope_base)
        found = (q * key).sum()
    found = found / math.sqrt(k)
    if cfg.score_bias == "alibi":
        found = found - 2 ** (-8 * (h + 1) / cfg.n_heads) * abs(i - j)
    if cfg.score_bias == "learned":
        found = found + params[f"{layer}.b_S"][h, i - j + cfg.n_ctx - 1]
    return found


def attention(cfg, params, layer: str, xs: list[Tensor]) -> list[Tensor]:
    k, out = cfg.head_size, []
    for i in range(len(xs)):
        seen = range(i + 1) if cfg.causal else range(len(xs))
        heads = []
        for h in range(cfg.n_heads):
            scores = [score(cfg, params, layer, h, xs, i, j) for j in seen]
            weights = scores
            if cfg.attention == "softmax":
                total = sum(math.exp(s) for s in scores)
                weights = [math.exp(s) / total for s in scores]
            own = h // (cfg.n_heads // cfg.kv_heads)
            values = [xs[j] @ params[f"{layer}.W_V"] + params.get(f"{layer}.b_V", 0.0) for j in seen]
            heads.append(sum(a * v[own * k : (own + 1) * k] for a, v in zip(weights, values, strict=True)))
        out.append(torch.cat(heads) @ params[f"{layer}.W_O"] + params.get(f"{layer}.b_O", 0.0))
    return out


def feed_forward(cfg, params, layer: str, x: Tensor) -> Tensor:
    if cfg.activation == "swiglu":
        h = activate("silu", x @ params[f"{layer}.W_g"]) * (x @ params[f"{layer}.W_u"])
        return h @ params[f"{layer}.W_2"]
    h = activate(cfg.activation, x @ params[f"{layer}.W_1"] + params.get(f"{layer}.b_1", 0.0))
    return h @ params[f"{layer}.W_2"] + params.get(f"{layer}.b_2", 0.0)


def stage(cfg, params, name: str, xs: list[Tensor], inner, skip: float) -> list[Tensor]:
    """A sublayer with its norm and skip connection."""
    ys = inner([norm(cfg, x, params, name) for x in xs] if cfg.norm == "pre" else xs)
    if cfg.residual:
        ys = [skip * x + y for x, y in zip(xs, ys, strict=True)]
    return [norm(cfg, y, params, name) for y in ys] if cfg.norm == "post" else ys


def embedded(cfg, params, inputs: Tensor) -> list[Tensor]:
    if cfg.inputs == "patches":
        p, n = cfg.patch_size, cfg.image_size // cfg.patch_size
        squares = [inputs[:, r * p : (r + 1) * p, c * p : (c + 1) * p] for r in range(n) for c in range(n)]
        xs = [square.reshape(-1) @ params["E"] for square in squares]
    elif cfg.inputs == "tokens":
        xs = [params["E"][int(token)] for token in inputs]
    else:
        xs = [x @ params["E"] if "E" in params else x for x in inputs]
    return [x + params["P"][t] for t, x in enumerate(xs)] if "P" in params else xs


@torch.no_grad()
def reference(cfg: cs.TransformerConfig, params: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Outputs for one sequence."""
    xs = embedded(cfg, params, inputs)
    for layer in (f"L{i}" for i in range(cfg.n_layers)):
        xs = stage(
            cfg,
            params,
            f"{layer}.ln1",
            xs,
            lambda y, n=layer: attention(cfg, params, n, y),
            cfg.residual_scale,
        )
        if cfg.ff_size:
            xs = stage(
                cfg,
                params,
                f"{layer}.ln2",
                xs,
                lambda ys, n=layer: [feed_forward(cfg, params, n, y) for y in ys],
                1.0,
            )
    xs = [norm(cfg, x, params, "ln_f") for x in xs] if cfg.norm == "pre" else xs
    xs = [sum(xs) / len(xs)] if cfg.outputs == "class" else xs
    U = params["E"].T if cfg.tied else params.get("U")
    zs = torch.stack([x if U is None else x @ U for x in xs]) + params.get("b_U", 0.0)
    return zs[0] if cfg.outputs == "class" else zs


ZOO = [case.name for case in oracles.CASES if isinstance(case.make(), cs.Transformer)]


@pytest.mark.parametrize("name", ZOO)
def test_forward_equals_the_loops(name: str):
    bench = oracles.bench(name)
    params = {key: p.detach() for key, p in bench.module.named_parameters()}
    x, _, _ = oracles.make_data(bench.case)
    truth = torch.stack([reference(bench.module.cfg, params, sequence) for sequence in x[:2]])
    assert relative_error(bench.module(x[:2]).detach(), truth) < 1e-13


@pytest.mark.parametrize("n_heads", [2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_slopes_are_exact_in_double_precision(n_heads: int, causal: bool):
    module = transformer(score_bias="alibi", d_model=6, n_heads=n_heads, positions="none", causal=causal)
    params = {key: p.detach() for key, p in module.named_parameters()}
    x = torch.tensor([[0, 3, 1, 4]])
    assert relative_error(module(x)[0].detach(), reference(module.cfg, params, x[0])) < 1e-13


def test_rope_turns_by_position_and_sees_differences_only():
    from curvescope.models.zoo.transformer import rotate

    source = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, generator=source).double() for _ in range(2))
    Q, K = (rotate(v.expand(1, 1, 7, 4), 10000.0)[0, 0] for v in (q, k))
    torch.testing.assert_close(Q[0], q)
    torch.testing.assert_close(Q.norm(dim=1), q.norm().expand(7))
    scores = Q @ K.T
    for offset in (-3, 0, 2):
        line = scores.diagonal(offset)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_causal_outputs_do_not_see_the_future():
    for case in ("pre-layernorm-gelu-2layers", "no-norm-linear-gelu_tanh-tied"):
        module = oracles.bench(case).module
        x = torch.tensor([[0, 3, 1, 4]])
        later = torch.tensor([[0, 3, 2, 2]])
        assert torch.equal(module(x)[:, :2], module(later)[:, :2])
        assert not torch.allclose(module(x)[:, 2:], module(later)[:, 2:])


def test_record_sees_patterns_and_streams():
    module, seen = oracles.bench("pre-layernorm-gelu-2layers").module, {}
    z = module(torch.tensor([[0, 3, 1]]), lambda place, tensor: seen.update({place: tensor}))
    assert z.shape == (1, 3, 5)
    places = ["attn.in", "attn.pattern", "attn.heads", "attn.out", "ff.in", "ff.out"]
    assert list(seen) == [f"L{i}.{place}" for i in range(2) for place in places]
    pattern = seen["L1.attn.pattern"]
    assert pattern.shape == (1, 2, 3, 3)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 2, 3).double())


@pytest.mark.parametrize("name", [name for name in oracles.CASE if name.startswith("mlp")])
def test_mlp_equals_the_formula(name: str):
    bench = oracles.bench(name)
    params = {key: p.detach() for key, p in bench.module.named_parameters()}
    x, _, _ = oracles.make_data(bench.case)
    cfg = bench.module.cfg
    h = params["E"][x] if cfg.vocab_size else x
    for i in range(1, cfg.depth + 1):
        h = h @ params[f"W_{i}"] + params.get(f"b_{i}", 0.0)
        h = activate(cfg.activation, h) if i < cfg.depth else h
    assert relative_error(bench.module(x).detach(), h) < 1e-13


def test_init_is_drawn_from_its_seed_with_its_scale():
    cfg = cs.TransformerConfig(d_model=64, n_heads=4, vocab_size=300, n_layers=2, seed=3)
    first, again = cs.Transformer(cfg), cs.Transformer(cfg)
    other = cs.Transformer(cs.TransformerConfig(**{**cfg.to_dict(), "seed": 4}))
    for (name, p), q, r in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        role = name.split(".")[-1]
        if role.startswith("b"):
            assert not p.any()
        elif role == "g":
            assert bool((p == 1).all())
        else:
            assert not torch.equal(p, r)
            expected = 0.02 / 2 if role in ("W_O", "W_2") else 0.02
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("scheme", "expected"), [("scaled", 0.8 / 8), ("xavier", math.sqrt(2 / 128))])
def test_other_inits(scheme: str, expected: float):
    module = cs.Transformer(cs.TransformerConfig(d_model=64, n_heads=4, init=scheme, embed_std=0.5))
    assert float(module.L0.W_Q.detach().std()) == pytest.approx(expected, rel=0.05)
    assert float(module.L1.W_O.detach().std()) == pytest.approx(expected, rel=0.05)
    assert float(module.E.detach().std()) == pytest.approx(0.5, rel=0.05)


def test_gradients_of_stacked_weights_and_tokens():
    """A range check that looks at numbers would not go through vmap of a gradient."""
    net = Transformer(TransformerConfig(n_layers=1, d_model=4, n_heads=1, n_ctx=3, vocab_size=5)).double()
    tokens = torch.tensor([[[0, 1, 2]], [[4, 3, 1]]])
    weights = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in net.named_parameters()}

    def loss(weights, tokens):
        return torch.func.functional_call(net, weights, (tokens,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(weights, tokens)
    for i in range(2):
        own = torch.func.grad(loss)({name: W[i] for name, W in weights.items()}, tokens[i])
        torch.testing.assert_close(own, {name: W[i] for name, W in found.items()})
    with pytest.raises(UsageError, match="expected tokens from 0 to 4"):
        torch.func.grad(loss)({name: W[0] for name, W in weights.items()}, tokens[0] + 5)
