"""Each primitive alone: Jacobian, curvature and all products against autograd of its output."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from curvescope.closed_form.attention.core import core_curvature, core_jacobian, core_point
from curvescope.closed_form.block_matrix import symmetric
from curvescope.closed_form.network.block import AttentionPrimitive
from curvescope.closed_form.network.input_output_layers import Embedding, Linear, MeanOverTokens, Positions
from curvescope.closed_form.network.primitives import TapeRecorder
from curvescope.closed_form.network.stack import assemble, curvature_sources, gauss_newton, stages
from curvescope.closed_form.network.tokens import FeedForwardPrimitive, NormPrimitive
from curvescope.closed_form.objectives import squared_error_objective
from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator

B, T, D = 2, 3, 4


def draws(seed):
    source = generator(17, seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)


def attention_parameters(draw, *, kv=4, value=4, biases=True, output=True):
    params = {"L0.W_Q": draw(D, 4), "L0.W_K": draw(D, kv), "L0.W_V": draw(D, value)}
    if biases:
        params |= {"L0.b_Q": draw(4), "L0.b_K": draw(kv), "L0.b_V": draw(value)}
    if output:
        params |= {"L0.W_O": draw(4 // kv * value, 3), "L0.b_O": draw(3)}
    return params


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def attention(x, params, **options):
    return AttentionPrimitive(x, params, prefix="L0.", **({"num_heads": 2, "mask": CAUSAL} | options))


def build(name):
    """Input, parameters, and the map from both to a primitive."""
    draw = draws(len(name))
    x = draw(B, T, D)
    norm = {"ln.g": draw(D), "ln.b": draw(D)}
    ffn = {"L0.W_1": draw(D, 3), "L0.b_1": draw(3), "L0.W_2": draw(3, 2), "L0.b_2": draw(2)}
    gated = {"L0.W_g": draw(D, 3), "L0.b_g": draw(3), "L0.W_u": draw(D, 3), "L0.W_2": draw(3, 2)}
    tokens = torch.tensor([[0, 2, 2], [1, 0, 3]])
    return {
        "layernorm": (x, norm, lambda x, p: NormPrimitive(x, p, prefix="ln.", kind="layernorm", eps=0.1)),
        "rmsnorm without affine": (
            x,
            {},
            lambda x, p: NormPrimitive(x, p, prefix="ln.", kind="rmsnorm", eps=0.0),
        ),
        "gelu": (x, ffn, lambda x, p: FeedForwardPrimitive(x, p, prefix="L0.", activation_name="gelu")),
        "swiglu": (x, gated, lambda x, p: FeedForwardPrimitive(x, p, prefix="L0.", activation_name="swiglu")),
        "attention": (x, attention_parameters(draw), attention),
        "attention without output": (x, attention_parameters(draw, biases=False, output=False), attention),
        "shared keys, no mask": (
            x,
            attention_parameters(draw, kv=2, value=3),
            lambda x, p: attention(x, p, mask=None, scale=0.8),
        ),
        "linear attention": (x, attention_parameters(draw), lambda x, p: attention(x, p, kind="linear")),
        "score bias": (
            x,
            attention_parameters(draw),
            lambda x, p: attention(x, p, bias=torch.arange(9.0, dtype=torch.float64).reshape(3, 3) / 4),
        ),
        "embedding": (
            torch.zeros(0, dtype=torch.float64),
            {"E": draw(5, D)},
            lambda x, p: Embedding(x, p, tokens=tokens),
        ),
        "positions": (x, {"P": draw(T + 1, D)}, Positions),
        "unembedding": (x, {"U": draw(D, 3), "b_U": draw(3)}, Linear),
        "tied unembedding": (x, {"E": draw(3, D)}, lambda x, p: Linear(x, p, weight="E", transposed=True)),
        "mean": (x, {}, lambda x, p: MeanOverTokens(x)),
    }[name]


NAMES = [
    "layernorm",
    "rmsnorm without affine",
    "gelu",
    "swiglu",
    "attention",
    "attention without output",
    "shared keys, no mask",
    "linear attention",
    "score bias",
    "embedding",
    "positions",
    "unembedding",
    "tied unembedding",
    "mean",
]


def differentiate(f, leaves, g):
    """J (outputs × all entries) and ∇²⟨g, f⟩ by autograd."""
    if not leaves[0].numel():  # autograd refuses an empty leaf
        empty = leaves[0]
        return differentiate(lambda *a: f(empty, *a), leaves[1:], g)
    n = g.numel()
    J = torch.cat(
        [j.reshape(n, leaf.numel()) for j, leaf in zip(jacobian(f, leaves), leaves, strict=True)], 1
    )
    rows = hessian(lambda *a: (f(*a) * g).sum(), leaves)
    K = torch.cat(
        [
            torch.cat([k.reshape(a.numel(), b.numel()) for k, b in zip(row, leaves, strict=True)], 1)
            for row, a in zip(rows, leaves, strict=True)
        ]
    )
    return J, K


def close(found, expected, tol=1e-12):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tol * (float(expected.abs().max()) + 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_primitive(name):
    x, params, make = build(name)
    here = make(x, params)
    assert set(here.parameters) == set(params)
    draw = draws(99)
    g = draw(*here.output.shape)
    names, leaves = list(params), (x, *params.values())

    def f(x, *values):
        return make(x, dict(zip(names, values, strict=True))).output

    J, K = differentiate(f, leaves, g)
    sizes = {"x": x.numel()} | {n: p.numel() for n, p in params.items()}
    found = here.jacobian()
    assert {key: J.shape[1] for key, J in found.items()} == sizes
    close(torch.cat([found[key] for key in sizes], 1), J)
    by_source = [symmetric(blocks, sizes, g).matrix for blocks in here.curvature(g).values()]
    close(sum(by_source, torch.zeros_like(K)), K)

    dx, dtheta = draw(*x.shape), {n: draw(*p.shape) for n, p in params.items()}
    v = torch.cat([dx.reshape(-1), *[dtheta[n].reshape(-1) for n in names]])

    def flat(part, tree):
        rest = [tree.get(n, torch.zeros_like(params[n])).reshape(-1) for n in names]
        return torch.cat([part.reshape(-1), *rest])

    close(here.jvp(dx, dtheta).reshape(-1), J @ v)
    close(here.jvp(dx, {}).reshape(-1), J[:, : x.numel()] @ dx.reshape(-1))  # a missing name is zero
    close(flat(*here.vjp(g)), J.T @ g.reshape(-1))
    close(flat(*here.curve(g, dx, dtheta)), K @ v)


@pytest.mark.parametrize("name", ["attention", "linear attention", "shared keys, no mask"])
def test_core_and_bilinear_parts_of_attention(name):
    """With queries, keys and values frozen to first order in (x, θ), the core is all that is left."""
    x, params, make = build(name)
    here = make(x, params)
    g = draws(98)(*here.output.shape)
    names, leaves = list(params), (x, *params.values())

    def straight(role):
        """The projection's first-order expansion at this point."""
        W, b = params[f"L0.W_{role}"], params[f"L0.b_{role}"]
        return lambda x_, p: x_ @ W + x @ (p[f"L0.W_{role}"] - W) + p[f"L0.b_{role}"] + 0 * b

    def f(x_, *values):
        p = dict(zip(names, values, strict=True))
        q, k, v = (here._spread(straight(role)(x_, p), role) for role in "QKV")
        kind = "linear" if name == "linear attention" else "softmax"
        mask = None if "no mask" in name else CAUSAL
        at = core_point(q, k, v, scale=here.at.scale, kind=kind, mask=mask)
        return at.output.transpose(1, 2).flatten(2) @ params["L0.W_O"]

    rows = hessian(lambda *a: (f(*a) * g).sum(), leaves)
    core = torch.cat(
        [
            torch.cat([k.reshape(a.numel(), b.numel()) for k, b in zip(row, leaves, strict=True)], 1)
            for row, a in zip(rows, leaves, strict=True)
        ]
    )
    sizes = {"x": x.numel()} | {n: p.numel() for n, p in params.items()}
    found = here.curvature(g)
    assert list(found) == ["L0.attention.core", "L0.attention.bilinear"]
    close(symmetric(found["L0.attention.core"], sizes, g).matrix, core)


def test_core_with_wide_values_and_a_row_without_keys():
    draw = draws(5)
    q, k, v, G = draw(2, T, 2), draw(2, T, 2), draw(2, T, 3), draw(2, T, 3)
    mask = torch.tensor([[False, False, False], [True, True, False], [True, False, True]])
    at = core_point(q, k, v, scale=0.7, mask=mask)
    assert float(at.output[:, 0].abs().max()) == 0
    assert bool(torch.isfinite(core_curvature(at, G)).all())
    at = core_point(q, k, v, scale=0.7)
    for i in range(2):

        def f(q, k, v):
            weights = (0.7 * q @ k.T).exp()
            return weights / weights.sum(-1, keepdim=True) @ v

        J, K = differentiate(f, (q[i], k[i], v[i]), G[i])
        close(core_jacobian(at)[i], J)
        close(core_curvature(at, G)[i], K)
    with pytest.raises(UsageError, match="softmax"):
        core_point(q, k, v, scale=1.0, kind="hard")  # pyright: ignore


def test_sources_and_assembly_agree_on_a_tape_of_ones_own():
    """Skips inside skips, scaled; cut into stages where none passes."""
    draw = draws(3)
    params = {"a.g": draw(D), "L0.W_1": draw(D, 3), "L0.W_2": draw(3, D), "b.g": draw(D), "b.b": draw(D)}
    recorder = TapeRecorder(draw(1, 2, D))
    recorder.apply(lambda x: NormPrimitive(x, params, prefix="a.", kind="rmsnorm", eps=0.1))
    start = recorder.now
    recorder.apply(
        lambda x: FeedForwardPrimitive(x, params, prefix="L0.", activation_name="silu"), skip=start, scale=0.3
    )
    recorder.apply(lambda x: NormPrimitive(x, params, prefix="b.", kind="layernorm", eps=0.1), skip=start)
    recorder.apply(
        lambda x: FeedForwardPrimitive(x, params, prefix="L0.", activation_name="gelu"), skip=start + 1
    )
    tape = recorder.tape()
    assert [len(stage.steps) for stage in stages(tape)] == [1, 3]
    objective = squared_error_objective(tape.output, draw(1, 2, D))
    total = gauss_newton(tape, objective)
    for term in curvature_sources(tape, objective.gradient).values():
        total = total + term
    close(assemble(tape, objective).matrix, total.matrix)
    close(assemble(tape, objective, functional=False).matrix, gauss_newton(tape, objective).matrix)
    assert list(tape.sizes) == ["x", *params]
