"""Curvature in activations against dense matrices of the rest of the model, written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.models.capture.activation_points import find_point, point_names
from oracles import PlainNet, drawn, relative_error, shaken, transformer
from selection import most, some

TIGHT = 1e-10
B, T, V = 3, 3, 5
Rest = Callable[[Tensor], Tensor]


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, V, (2, B, T), generator=source)
    y[1, 1] = -100
    return x, y


def problem_of(module: Any, sizes: tuple[int, ...] = (B,)) -> cs.Problem:
    x, y = tokens()
    cut = zip(x.split(sizes), y.split(sizes), strict=True)
    return cs.Problem(module, [cs.Batch(a, b) for a, b in cut])


def loss(z: Tensor, y: Tensor) -> Tensor:
    """The mean over targets that count, by hand."""
    keep = y != -100
    return -z.log_softmax(-1)[keep].gather(-1, y[keep][:, None]).sum() / keep.sum()


def dense(rest: Rest, x: Tensor) -> Tensor:
    """∂²L/∂x² by double backward of the rest of the model."""
    y = tokens()[1]
    shape, start = x.shape, x.detach().flatten()
    return torch.autograd.functional.hessian(lambda v: loss(rest(v.view(shape)), y), start, vectorize=True)


def dense_ggn(rest: Rest, x: Tensor) -> Tensor:
    """Jᵀ B J with both written out."""
    y, start = tokens()[1], x.detach().flatten()
    J = torch.autograd.functional.jacobian(lambda v: rest(v.view(x.shape)).flatten(), start, vectorize=True)
    z = rest(x).detach()
    curvature = torch.autograd.functional.hessian(
        lambda u: loss(u.view(z.shape), y), z.flatten(), vectorize=True
    )
    return J.T @ curvature @ J


# --------------------------------------------------------------------------- the rest of a zoo Transformer


def zoo_points(module: Any) -> dict[str, tuple[Tensor, Rest]]:
    """x and the rest of the model behind it, for the points of layer 0 and the end; nothing is hooked."""
    cfg, layer, ids = module.cfg, module.L0, tokens()[0]
    pre, post = cfg.norm == "pre", cfg.norm == "post"
    quiet: Any = lambda place, tensor: None  # noqa: E731

    def end(x: Tensor) -> Tensor:
        return x @ module.U

    def after(x: Tensor, first: int = 1) -> Tensor:
        for i in range(first, cfg.n_layers):
            x = getattr(module, f"L{i}")(x, quiet)
        return end(module.ln_f(x) if pre else x)

    def behind_middle(m: Tensor) -> Tensor:
        out = m + layer.feed_forward(layer.ln2(m) if pre else m, quiet)
        return after(layer.ln2(out) if post else out)

    def behind_heads(F: Tensor) -> Tensor:
        m = cfg.residual_scale * x0 + F @ layer.W_O + layer.b_O
        return behind_middle(layer.ln1(m) if post else m)

    x0 = module.embed(ids)
    seen: dict[str, Tensor] = {}
    module(ids, record=seen.__setitem__)
    F, k = seen["L0.attn.heads"], cfg.head_size
    m = cfg.residual_scale * x0 + seen["L0.attn.out"]
    m = layer.ln1(m) if post else m
    last = module.L0(x0, quiet)
    for i in range(1, cfg.n_layers):
        last = getattr(module, f"L{i}")(last, quiet)
    return {
        "embed": (x0, lambda x: after(x, 0)),
        "L0.in": (x0, lambda x: after(x, 0)),
        "L0.mid": (m, behind_middle),
        "L0.out": (module.L0(x0, quiet), after),
        "L0.attn.heads": (F, behind_heads),
        "L0.h1.out": (F[..., k:], lambda z: behind_heads(torch.cat([F[..., :k], z], -1))),
        "final": (module.ln_f(last) if pre else last, end),
    }


def zoo(n_layers: int = 2, **more: Any) -> Any:
    return transformer(n_layers=n_layers, **more)


KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "rms": {"norm_kind": "rmsnorm", "activation": "swiglu", "positions": "rope"},
    "post": {"norm": "post", "residual_scale": 0.7},
    "plain": {"norm": "none", "merged_qk": True, "causal": False},
    "bare": {"norm": "post", "norm_affine": False},
}


@pytest.mark.parametrize("kind", most(list(KINDS), but=["bare", "rms"]))
def test_every_point_of_the_zoo_is_the_dense_hessian_and_ggn(kind: str):
    module = zoo(**KINDS[kind])
    problem = problem_of(module)
    for at, (x, rest) in zoo_points(module).items():
        H, G = cs.ActivationHessian(problem, at), cs.ActivationGGN(problem, at)
        torch.testing.assert_close(H.values(), x.detach().flatten())
        assert relative_error(H.to_dense(), dense(rest, x)) < TIGHT, at
        if kind == "pre":
            assert relative_error(G.to_dense(), dense_ggn(rest, x)) < TIGHT, at
            assert G.psd


def test_gradient_and_hessian_agree_with_finite_differences():
    module = zoo()
    problem = problem_of(module)
    x, rest = zoo_points(module)["L0.mid"]
    H = cs.ActivationHessian(problem, "L0.mid")
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, h = tokens()[1], 1e-5

    def slope(step: float) -> Tensor:
        moved = (x.detach().flatten() + step * v).view(x.shape).requires_grad_()
        return torch.autograd.grad(loss(rest(moved), y), moved)[0].flatten()

    assert relative_error(H.gradient(), slope(0.0)) < TIGHT
    assert relative_error(H @ v, (slope(h) - slope(-h)) / (2 * h)) < 1e-7


def test_what_the_unembedding_reads_bends_as_the_softmax_does():
    module = zoo()
    x, y = tokens()
    p = module(x).softmax(-1).detach()
    H = cs.ActivationHessian(problem_of(module), "final").to_dense()
    U, d = module.U.detach(), module.U.shape[0]
    for row, (n, t) in enumerate((n, t) for n in range(B) for t in range(T)):
        A = (torch.diag(p[n, t]) - torch.outer(p[n, t], p[n, t])) * (y[n, t] != -100) / (y != -100).sum()
        here = slice(row * d, row * d + d)
        torch.testing.assert_close(H[here, here], U @ A @ U.T)
        H[here, here] = 0
    assert float(H.abs().max()) < 1e-14  # behind the last layer tokens do not meet


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_products_do_not_depend_on_batching(sizes: tuple[int, ...]):
    module = zoo()
    for at in ("L0.mid", "L0.h0.out"):
        whole = cs.ActivationHessian(problem_of(module), at)
        parts = cs.ActivationHessian(problem_of(module, sizes), at)
        assert relative_error(parts.to_dense(), whole.to_dense()) < TIGHT
        assert parts.tokens == whole.tokens
        torch.testing.assert_close(parts.gradient(), whole.gradient())


def test_some_tokens_are_rows_and_columns_of_the_whole():
    problem = problem_of(zoo(), (2, 1))
    whole = cs.ActivationHessian(problem, "L0.out")
    H, d = whole.to_dense(), whole.width
    wanted = [(2, 1), (0, 2), (0, 0)]
    rows = [whole.tokens.index(token) * d + i for token in sorted(wanted) for i in range(d)]
    some = cs.ActivationHessian(problem, "L0.out", tokens=wanted)
    assert some.tokens == sorted(wanted)
    assert relative_error(some.to_dense(), H[rows][:, rows]) < TIGHT
    assert relative_error(some.values(), whole.values()[rows]) < TIGHT
    one = cs.ActivationHessian(problem, "L0.out", tokens=(2, 1))
    assert relative_error(one.to_dense(), H[rows[-d:]][:, rows[-d:]]) < TIGHT
    sequence = cs.ActivationGGN(problem, "L0.out", tokens=1)
    here = slice(T * d, 2 * T * d)
    assert (
        relative_error(sequence.to_dense(), cs.ActivationGGN(problem, "L0.out").to_dense()[here, here])
        < TIGHT
    )


@pytest.mark.parametrize("chunk", some([2, None], 1))
def test_tokens_apart_are_the_diagonal_blocks(chunk: int | None):
    problem = problem_of(zoo(1), (2, 1))
    whole = cs.ActivationHessian(problem, "L0.in", chunk=chunk)
    H, d = whole.to_dense(), whole.width
    mask = torch.block_diag(*[torch.ones(d, d, dtype=torch.float64)] * len(whole.tokens))
    assert relative_error(whole.token_blocks().to_dense(), H * mask) < TIGHT
    assert float((H * (1 - mask)).abs().max()) > 1e-4


def test_damping_is_added_to_the_whole_and_to_tokens():
    problem = problem_of(zoo(1), (2, 1))
    H, damped = cs.ActivationHessian(problem, "L0.in"), cs.ActivationHessian(problem, "L0.in", damping=0.3)
    eye = torch.eye(H.shape[0], dtype=torch.float64)
    assert relative_error(damped.to_dense(), H.to_dense() + 0.3 * eye) < TIGHT
    assert relative_error(damped.token_blocks().to_dense(), H.token_blocks().to_dense() + 0.3 * eye) < TIGHT
    with pytest.raises(cs.UsageError, match="finite damping of at least 0"):
        cs.ActivationHessian(problem, "L0.in", damping="much")  # pyright: ignore[reportArgumentType]


def test_algorithms_take_it():
    H = cs.ActivationHessian(problem_of(zoo()), "L1.mid")
    values = torch.linalg.eigvalsh(H.to_dense())
    assert cs.eigsh(H, k=1).values[0] == pytest.approx(float(values[-1]), rel=1e-8)
    found = cs.trace(H, num_probes=20)
    assert abs(found.value - float(values.sum())) < 4 * found.stderr
    rho = cs.spectral_density(H, num_probes=2)
    assert np.isfinite(rho.density).all()


def test_after_the_parameters_changed_it_is_the_matrix_of_the_new_ones():
    module = zoo()
    problem = problem_of(module)
    H = cs.ActivationHessian(problem, "L0.mid")
    before = H.to_dense()
    for change in (lambda p: p.mul_(1.3), lambda p: p.data.mul_(0.7)):
        with torch.no_grad():
            change(module.L1.W_1)
        now = H.to_dense()
        x, rest = zoo_points(module)["L0.mid"]
        assert relative_error(now, dense(rest, x)) < TIGHT
        assert relative_error(now, before) > 1e-3
    module.L0.register_forward_hook(lambda m, a, out: 1.5 * out)
    assert relative_error(H.to_dense(), now) > 1e-3


def test_a_problem_at_other_parameters():
    module = zoo()
    problem = problem_of(module)
    moved = problem.at({"L1.W_1": 1.4 * module.L1.W_1.detach()})
    found = cs.ActivationHessian(moved, "L0.out").to_dense()
    with torch.no_grad():
        module.L1.W_1.mul_(1.4)
    assert relative_error(found, cs.ActivationHessian(problem, "L0.out").to_dense()) < TIGHT


def test_many_products_are_recorded_and_replayed_alike():
    H = cs.ActivationHessian(problem_of(zoo()), "L0.in")
    A = H.to_dense()
    for j in range(6):
        torch.testing.assert_close(H @ torch.eye(H.shape[0], dtype=torch.float64)[j], A[:, j])


def test_engines_agree_and_the_module_is_as_it_was():
    module = zoo()
    problem = problem_of(module)
    hooks = [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in module.modules()]
    for at in ("L0.h0.out", "L1.ff.out"):
        fast, plain = (cs.ActivationHessian(problem, at, engine=e) for e in ("fast", "autograd"))
        assert relative_error(fast.to_dense(), plain.to_dense()) < TIGHT
    assert [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in module.modules()] == hooks
    assert "project" not in vars(module.L0)


# --------------------------------------------------------------------------------------- modules of others


def test_any_submodule_is_a_point():
    module = shaken(drawn(PlainNet))
    problem, ids = problem_of(module), tokens()[0]

    def from_embedding(x: Tensor) -> Tensor:
        handle = module.emb.register_forward_hook(lambda m, a, out: x)
        try:
            return module(ids)
        finally:
            handle.remove()

    x = module.emb(ids)
    assert relative_error(cs.ActivationHessian(problem, "emb").to_dense(), dense(from_embedding, x)) < TIGHT
    end = cs.ActivationHessian(problem, "head.in")
    x = end.values().view(B, T, -1)
    assert relative_error(end.to_dense(), dense(lambda h: h @ module.emb.weight.detach().T, x)) < TIGHT


def test_layers_of_torch_by_name():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
    module = nn.Sequential(nn.Embedding(V, 4), nn.TransformerEncoder(layer, 2), nn.Linear(4, V))
    problem = problem_of(shaken(drawn(lambda: module)))
    at = next(name for name, _ in problem.model.module.named_modules() if name.endswith("layers.1"))
    module = problem.model.module.eval()
    H = cs.ActivationHessian(problem, at)
    x = H.values().view(B, T, -1)
    assert relative_error(H.to_dense(), dense(lambda m: module[2](m), x)) < TIGHT


def test_activations_without_positions():
    module = shaken(drawn(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))))
    x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = cs.Problem(module, (x, y[:, :2]), loss="mse_mean")
    H = cs.ActivationHessian(problem, "0")
    W = module[2].weight

    def value(v: Tensor) -> Tensor:
        return (v.view(5, 4).tanh() @ W.detach().T + module[2].bias.detach() - y[:, :2]).square().mean()

    truth = torch.autograd.functional.hessian(value, module[0](x).detach().flatten())
    assert relative_error(H.to_dense(), truth) < TIGHT
    assert H.tokens == []
    assert relative_error(cs.ActivationHessian(problem, "0", tokens=2).to_dense(), truth[8:12, 8:12]) < TIGHT


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("at", "options", "words"),
    [
        ("L0.middle", {}, "L0.mid"),
        ("L7.mid", {}, "expected a point"),
        ("L0.mid", {"tokens": (0, 9)}, "positions from 0 to 2"),
        ("L0.mid", {"tokens": 7}, "sequences from 0 to 2"),
        ("L0.mid", {"tokens": []}, "pairs"),
        ("L0.mid", {"tokens": [(0, 1), (0, 1)]}, "different"),
        ("L0.mid", {"chunk": 0}, "chunk"),
    ],
)
def test_bad_input_is_one_sentence(at: str, options: dict[str, Any], words: str):
    problem = problem_of(zoo())
    with pytest.raises(cs.UsageError, match=words):
        cs.ActivationHessian(problem, at, **options)


class Twice(nn.Module):
    """Its linear map is called twice, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.map, self.unused = nn.Embedding(V, V), nn.Linear(V, V), nn.Linear(V, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.map(self.map(self.emb(ids)).tanh())


@pytest.mark.parametrize(
    ("at", "words"), [("map", "2 times"), ("unused", "0 times"), ("emb.in", "real numbers")]
)
def test_a_point_is_passed_once(at: str, words: str):
    problem = problem_of(shaken(drawn(Twice)))
    with pytest.raises(cs.UsageError, match=words):
        cs.ActivationHessian(problem, at) @ torch.zeros(B * T * V, dtype=torch.float64)


def test_names_of_points():
    model = cs.load(zoo())
    assert find_point(model, "in").write.key == find_point(model, "embed").write.key
    assert point_names(model)[:4] == ["L0.in", "L0.mid", "L0.out", "L0.attn.out"]
    assert point_names(model)[-1] == "final"


@pytest.mark.parametrize("make", [cs.ActivationHessian, cs.ActivationGGN])
@pytest.mark.parametrize(
    "at", ["embed", "L0.mid", "L1.attn.out", "L1.h1.out", "L1.ff.out", "L1.out", "final"]
)
def test_layers_may_be_computed_again(at: str, make: Any):
    model = cs.TransformerConfig(n_layers=3, d_model=4, n_heads=2, n_ctx=T, vocab_size=V)
    problem = problem_of(cs.load(model, dtype="float64"))
    for engine in ("fast", "autograd"):
        kept, again = make(problem, at, engine=engine), make(problem, at, engine=engine, checkpoint=True)
        v = torch.randn(kept.shape[1], generator=torch.Generator().manual_seed(0)).double()
        assert relative_error(again @ v, kept @ v) < TIGHT
        assert relative_error(again.gradient(), kept.gradient()) < TIGHT


@pytest.mark.parametrize("at", ["embed", "L1.mid", "L1.h1.out", "L1.out", "final"])
def test_weights_may_be_kept_in_half_precision(at: str):
    model = cs.load(cs.TransformerConfig(n_layers=3, d_model=4, n_heads=2, n_ctx=T, vocab_size=V))
    half, wide = (problem_of(cs.load(model.module.bfloat16(), dtype=kind)) for kind in (None, "float32"))
    A, B = cs.ActivationHessian(half, at), cs.ActivationHessian(wide, at)
    v = torch.randn(A.shape[1], generator=torch.Generator().manual_seed(0))
    assert relative_error(A @ v, B @ v) < 1e-5
    assert relative_error(A.gradient(), B.gradient()) < 1e-5
