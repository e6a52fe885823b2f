"""K-FAC, EK-FAC and Shampoo against loops over terms and rows, closed forms, and other cuts of the data."""

from __future__ import annotations

import math
from typing import Any

import kronecker_by_hand as by_hand
import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.errors import CurvescopeError, UsageError
from oracles import as_batches, bench, cut, drawn, make_data, relative_error, shaken
from selection import some

EXACT = 1e-12
IGNORED = -100
LAYERS = ["q", "k", "v", "o", "mix", "head"]
CASES = [
    "pre-rmsnorm-swiglu-rope-grouped",
    "plain-attention-tied",
    "stream-linear-no-residual",
    "no-norm-linear-gelu_tanh-tied",
    "tokens-to-class-rope",
    "post-layernorm-relu-ignored",
    "mlp-relu-mse",
]


def small(seed: int = 0) -> nn.Module:
    return shaken(drawn(by_hand.Small), seed, scale=0.3)


def data(num: int = 3, length: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and targets; the second sequence ends early, in the third a target inside does not count."""
    source = torch.Generator().manual_seed(1)
    ids, y = torch.randint(0, 5, (2, num, length), generator=source)
    y[1, length - 1 :] = IGNORED
    y[2, 0] = IGNORED
    return ids, y


def pairs(ids: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(ids, y, strict=True))


def weight_of(name: str) -> str:
    return f"{name}.weight"


def in_layer_order(K: Any, name: str) -> Tensor:
    """The dense matrix of the layer that holds a block, weights before bias."""
    layer = next(x for x in K.layers if x.name == name)
    at = torch.cat([K.space.positions(b) for b in layer.blocks])
    return K.to_dense()[at][:, at]


@pytest.mark.parametrize(
    ("kind", "bias", "sharing"),
    some(
        [
            *(("ggn", "joint", "reduce"), ("empirical", "separate", "expand")),
            *(("ggn", "joint", "expand"), ("empirical", "separate", "reduce")),
        ],
        2,
    ),
)
def test_factors_are_the_moments_by_hand(sharing: str, kind: str, bias: str):
    module, (ids, y) = small(), data()
    K = cs.KFAC(cs.Problem(module, (ids, y)), kind=kind, sharing=sharing, bias=bias)
    for name in LAYERS:
        ones = bias == "joint" and name != "q"
        A, B = by_hand.kfac(module, name, pairs(ids, y), kind=kind, sharing=sharing, ones=ones)
        found = K.factors(weight_of(name))
        assert relative_error(found[0], A) < EXACT
        assert float((found[1] - B).norm()) < EXACT * max(float(B.norm()), 1e-3)  # keys: zero if reduced
        if not (name == "k" and sharing == "reduce"):
            assert relative_error(in_layer_order(K, weight_of(name)), torch.kron(A, B)) < 1e-10
    if bias == "separate":
        assert relative_error(K.factors("head.bias")[0], torch.ones(1, 1)) < EXACT
        assert relative_error(K.factors("head.bias")[1], K.factors("head.weight")[1]) < EXACT


@pytest.mark.parametrize("kind", ["ggn", "empirical"])
def test_eigenvalues_are_the_curvature_in_the_eigenbasis(kind: str):
    module, (ids, y) = small(), data()
    E = cs.EKFAC(cs.Problem(module, (ids, y)), kind=kind)
    for layer, spectrum in zip(E.layers[1:], E.spectra()[1:], strict=True):
        name = layer.name.removesuffix(".weight")
        F = by_hand.curvature(module, name, pairs(ids, y), kind=kind, ones=name != "q")
        Q = torch.kron(*spectrum.vectors)
        assert relative_error(spectrum.values.flatten(), (Q.T @ F @ Q).diagonal()) < EXACT
        nearest = Q @ torch.diag((Q.T @ F @ Q).diagonal()) @ Q.T
        assert relative_error(in_layer_order(E, layer.name), nearest) < EXACT


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_shampoo_is_a_power_of_moments_of_gradients(exponent: float):
    module, (ids, y) = small(), data()
    S = cs.Shampoo(cs.Problem(module, (ids, y)), "o.*", exponent=exponent)
    L, R = by_hand.shampoo(module, "o", pairs(ids, y), kind="empirical", ones=True)
    values, Q = torch.linalg.eigh(torch.kron(L, R))
    power = Q @ torch.diag(values.clamp(min=0) ** exponent) @ Q.T * L.trace() ** (1 - 2 * exponent)
    assert relative_error(in_layer_order(S, "o.weight"), power) < 1e-10
    if exponent == 1:
        F = by_hand.curvature(module, "o", pairs(ids, y), kind="empirical", ones=True)
        assert S.trace() == pytest.approx(float(F.trace()), rel=1e-12)


def test_a_deep_linear_network_with_squared_error_is_exact():
    module = shaken(
        cs.MLP(cs.MLPConfig(d_in=3, d_hidden=4, d_out=2, depth=3, activation="identity", bias=True))
    )
    x, y = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = cs.Problem(module, (x, y[:, :2]), "mse")
    for bias in ("joint", "separate"):
        for make in (cs.KFAC, cs.EKFAC):
            K = make(problem, kind="ggn", bias=bias)
            for layer in K.layers:
                G = cs.GGN(problem, *(block.name for block in layer.blocks)).to_dense()
                assert relative_error(in_layer_order(K, layer.name), G) < EXACT


def test_reduced_factors_are_exact_where_outputs_are_means_over_tokens():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x)).mean(1)

    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 3, 3, generator=source).double(), torch.randn(5, 2, generator=source).double()
    problem = cs.Problem(shaken(drawn(Mean)), (x, y), "mse")
    for sharing, exact in (("reduce", True), ("expand", False)):
        near = []
        for name in ("up", "down"):
            K = cs.KFAC(problem, f"{name}.*", kind="ggn", sharing=sharing)
            near.append(relative_error(K.to_dense(), cs.GGN(problem, f"{name}.*").to_dense()))
        assert (max(near) < EXACT) is exact


def test_one_token_is_exact_for_cross_entropy():
    ids, y = data()
    problem = cs.Problem(small(), (ids[:1, :1], y[:1, :1]))
    K = cs.KFAC(problem, "head.*", "emb.weight", kind="ggn")
    for layer in K.layers:
        G = cs.GGN(problem, *(block.name for block in layer.blocks))
        at = torch.cat([G.space.positions(block) for block in layer.blocks])
        assert relative_error(in_layer_order(K, layer.name), G.to_dense()[at][:, at]) < EXACT


@pytest.mark.parametrize("name", some(CASES, few=3))
def test_traces_are_those_of_the_exact_matrix(name: str):
    problem = bench(name).problem
    E = cs.EKFAC(problem, kind="ggn")
    diagonal = bench(name).truth("ggn").diagonal()
    whole = problem.space()
    exact = sum(float(diagonal[whole.positions(block)].sum()) for block in E.space)
    assert E.trace() == pytest.approx(exact, rel=1e-10)
    assert cs.Shampoo(problem, kind="ggn", exponent=1).trace() == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("name", some(CASES, few=3))
def test_nothing_depends_on_batching(name: str):
    found = bench(name)
    cuts = [cut(make_data(found.case), sizes) for sizes in ([5], [1, 4])]
    problems = [cs.Problem(found.model, as_batches(c), found.problem.loss) for c in cuts]
    v = torch.randn(problems[0].space().size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for make in (
        lambda p: cs.KFAC(p, kind="mc", num_samples=2, sharing="reduce"),
        lambda p: cs.EKFAC(p, kind="ggn"),
    ):
        whole, *others = [make(p) for p in problems]
        for other in others:
            assert relative_error(other @ v[: other.shape[0]], whole @ v[: whole.shape[0]]) < 1e-8


def test_padding_changes_nothing():
    module, (ids, y) = small(), data()
    pad = torch.zeros(3, 2, dtype=torch.long)
    longer = torch.cat([ids, pad], 1), torch.cat([y, pad + IGNORED], 1)
    problems = [cs.Problem(module, d) for d in ((ids, y), longer)]
    for make, sharing in ((cs.EKFAC, "expand"), (cs.KFAC, "reduce")):
        a, b = (make(problem, "[!k]*", kind="empirical", sharing=sharing) for problem in problems)
        assert relative_error(b.to_dense(), a.to_dense()) < 1e-10


def test_draws_are_those_of_the_monte_carlo_fisher():
    module, d = small(), data()
    problem = cs.Problem(module, d)
    E = cs.EKFAC(problem, kind="mc", terms="separate", num_samples=3, seed=4)
    F = cs.MonteCarloFisher(problem, *(b.name for b in E.space), num_samples=3, seed=4)
    assert E.trace() == pytest.approx(float(F.to_dense().trace()), rel=1e-10)


def test_draws_together_have_the_exact_trace_on_average():
    problem = cs.Problem(small(), data())
    traces = [cs.EKFAC(problem, "o.weight", kind="mc", num_samples=20, seed=s).trace() for s in range(12)]
    values = torch.tensor(traces, dtype=torch.float64)
    exact = float(cs.GGN(problem, "o.weight").to_dense().trace())
    assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(len(values))


def test_forward_only_has_identity_for_gradients():
    problem = cs.Problem(small(), data())
    A, B = cs.KFAC(problem, "mix.*", kind="forward-only").factors("mix.bias")
    assert relative_error(A, cs.KFAC(problem, "mix.*", kind="ggn").factors("mix.weight")[0]) < EXACT
    assert torch.equal(B, torch.eye(4, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------- as operators


def test_functions_are_those_of_the_dense_matrix():
    for make in (cs.KFAC, cs.EKFAC, cs.Shampoo):
        K = make(cs.Problem(small(), data()), "mix.*", "head.*", kind="ggn")
        dense, eye = K.to_dense(), torch.eye(K.shape[0], dtype=torch.float64)
        damped = dense + 0.3 * eye
        assert relative_error(K.inverse(0.3).to_dense(), torch.linalg.inv(damped)) < 1e-10
        root = K.inverse_root(0.3).to_dense()
        assert relative_error(root @ root @ damped, eye) < 1e-10
        fourth = K.inverse_root(0.3, power=4).to_dense()
        assert relative_error(fourth @ fourth, root) < 1e-10
        half = K.root().to_dense()
        assert relative_error(half @ half, dense) < 1e-10
        assert K.trace() == pytest.approx(float(dense.trace()), rel=1e-12)
        assert K.logdet(0.3) == pytest.approx(float(torch.logdet(damped)), rel=1e-10)
        for op in (K, K.inverse(0.3), K.root()):
            assert (op.symmetric, op.psd) == (True, True)


def test_functions_of_functions_and_of_fixed_ones():
    K = cs.EKFAC(cs.Problem(small(), data()), "mix.*", "head.*", kind="ggn")
    fixed, damped = K.fixed(), K.to_dense() + 0.3 * torch.eye(K.shape[0], dtype=torch.float64)
    assert relative_error(fixed.inverse(0.3).to_dense(), torch.linalg.inv(damped)) < 1e-10
    assert relative_error(K.inverse(0.3).inverse().to_dense(), damped) < 1e-10
    assert fixed.logdet(0.3) == pytest.approx(K.logdet(0.3), rel=1e-12)
    assert (
        relative_error(fixed.inverse(0.3, split="pi").to_dense(), K.inverse(0.3, split="pi").to_dense())
        < EXACT
    )
    with pytest.raises(UsageError, match="split='pi'"):
        K.root().inverse(0.3, split="pi")


@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_blocks_are_submatrices_and_of_whole_layers_have_inverses(bias: Any):
    K = cs.EKFAC(cs.Problem(small(), data()), "mix.*", "head.*", kind="ggn", bias=bias)
    dense, at = K.to_dense(), {b.name: K.space.positions(b) for b in K.space}
    some = torch.cat([torch.arange(K.shape[0])[at[name]] for name in at if name.startswith("mix")])
    mix, inside = K.block("mix.*"), dense[some][:, some]
    assert relative_error(mix.to_dense(), inside) < EXACT
    damped = inside + 0.1 * torch.eye(len(some), dtype=torch.float64)
    assert relative_error(mix.inverse(0.1).to_dense(), torch.linalg.inv(damped)) < 1e-10
    weight = K.block(["mix.weight"])
    assert relative_error(weight.to_dense(), dense[at["mix.weight"]][:, at["mix.weight"]]) < EXACT
    assert weight.symmetric
    with pytest.raises(UsageError, match="no block matches 'mixed'"):
        K.block("mixed")


@pytest.mark.parametrize("make", [cs.KFAC, cs.EKFAC, cs.Shampoo])
def test_damping_is_added(make: Any):
    problem = cs.Problem(small(), data())
    K, damped = make(problem, "mix.*", kind="ggn"), make(problem, "mix.*", kind="ggn", damping=0.2)
    eye = torch.eye(K.shape[0], dtype=torch.float64)
    assert relative_error(damped.to_dense(), K.to_dense() + 0.2 * eye) < EXACT
    assert relative_error(damped.inverse(0.1).to_dense(), K.inverse(0.3).to_dense()) < 1e-10
    assert damped.trace() == pytest.approx(K.trace() + 0.2 * len(eye))
    with pytest.raises(UsageError, match="damping of at least 0"):
        make(problem, damping=-1.0)


def test_split_damping_adds_to_both_factors():
    K = cs.KFAC(cs.Problem(small(), data()), "mix.*", kind="ggn")
    A, B = K.factors("mix.weight")
    pi = math.sqrt(float(A.trace()) / len(A) / (float(B.trace()) / len(B)))
    root, eye = math.sqrt(0.1), torch.eye(5, dtype=torch.float64)
    a, b = A + pi * root * eye, B + root / pi * eye[:4, :4]
    inverse = torch.kron(torch.linalg.inv(a), torch.linalg.inv(b))
    layer = torch.cat([K.space.positions(x) for x in K.layers[0].blocks])
    assert relative_error(K.inverse(0.1, split="pi").to_dense()[layer][:, layer], inverse) < 1e-10


def test_it_preconditions():
    problem = cs.Problem(small(), data())
    K = cs.KFAC(problem, kind="ggn")
    names = [block.name for block in K.space]
    g = problem.gradient(*names)
    step = K.inverse(1e-2) @ g
    assert float(step @ g) > 0
    assert relative_error(K @ step + 1e-2 * step, g) < 1e-10


def test_factors_follow_the_parameters_and_fixed_ones_do_not():
    module = small()
    problem = cs.Problem(module, data())
    K = cs.KFAC(problem, kind="ggn")
    inverse, before = K.inverse(0.1), K.to_dense()
    fixed = K.fixed()
    with torch.no_grad():
        module.mix.weight += 0.5  # pyright: ignore[reportOperatorIssue]
    fresh = cs.KFAC(problem, kind="ggn")
    assert relative_error(K.to_dense(), fresh.to_dense()) < EXACT < relative_error(before, fresh.to_dense())
    assert relative_error(inverse.to_dense(), fresh.inverse(0.1).to_dense()) < EXACT
    assert torch.equal(fixed.to_dense(), before)
    module.mix.bias.data += 0.5  # past autograd
    assert relative_error(K.to_dense(), cs.KFAC(problem, kind="ggn").to_dense()) < EXACT


def test_a_change_inside_a_frozen_block_is_an_error():
    module = small()
    inverse = cs.KFAC(cs.Problem(module, data()), "o.*").inverse(0.1)

    def change() -> None:
        with inverse.frozen():
            module.o.bias.data += 1.0

    with pytest.raises(CurvescopeError, match="changed"):
        change()


def test_the_module_is_left_as_it_was():
    module = small().train()
    before = {name: p.clone() for name, p in module.named_parameters()}
    cs.EKFAC(cs.Problem(module, data()), kind="mc").trace()
    assert module.training
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())


def test_it_can_be_taken_at_another_point():
    module, d = small(), data()
    problem = cs.Problem(module, d)
    other = {"mix.weight": module.mix.weight.detach() + 0.2}
    moved = small()
    moved.load_state_dict({**module.state_dict(), **other})
    ours, theirs = cs.KFAC(problem.at(other), kind="ggn"), cs.KFAC(cs.Problem(moved, d), kind="ggn")
    assert relative_error(ours.to_dense(), theirs.to_dense()) < EXACT


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: cs.KFAC(p, kind="exact"), "expected kind as one of"),
        (lambda p: cs.KFAC(p, sharing="sum"), "expected sharing="),
        (lambda p: cs.KFAC(p, bias="both"), "expected bias="),
        (lambda p: cs.KFAC(p, terms="all"), "expected terms as one of"),
        (lambda p: cs.KFAC(p, num_samples=0), "num_samples of at least 1"),
        (lambda p: cs.KFAC(p, kind="ggn", num_samples=2), "num_samples belongs to"),
        (lambda p: cs.KFAC(p, "nothing"), "no block matches"),
        (lambda p: cs.KFAC(p.model), "expected a cs.Problem"),
        (lambda p: cs.EKFAC(p, kind="forward-only"), "EKFAC needs gradients"),
        (lambda p: cs.Shampoo(p, exponent=0), "expected an exponent"),
        (lambda p: cs.KFAC(p).inverse(-1.0), "expected a damping of at least 0"),
        (lambda p: cs.KFAC(p).inverse(1.0, split="half"), "expected split="),
        (lambda p: cs.KFAC(p).inverse_root(1.0, power=0), "expected a power above 0"),
        (lambda p: cs.KFAC(p).inverse(), "singular"),
        (lambda p: cs.KFAC(p).factors("nothing"), "no layer of this operator holds"),
        (lambda p: cs.KFAC(p) @ torch.ones(3, dtype=torch.float64), "expected a vector"),
        (lambda p: cs.kfac_quality(p, methods=["kfak"]), "expected an approximation"),
        (lambda p: cs.kfac_quality(p, "q.*", max_size=3), "at most max_size=3"),
    ],
)
def test_bad_input_is_one_sentence(make: Any, said: str):
    problem = cs.Problem(small(), data())
    with pytest.raises(CurvescopeError, match=said):
        make(problem)


def test_a_block_that_is_no_linear_map_is_said():
    problem = bench("pre-rmsnorm-swiglu-rope-grouped").problem
    assert set(cs.KFAC(problem).left_out) == {"L0.ln1.g", "L0.ln2.g", "ln_f.g"}
    with pytest.raises(UsageError, match=r"ln_f\.g has no Kronecker factors"):
        cs.KFAC(problem, "ln_f.g")
    with pytest.raises(UsageError, match="none of"):
        cs.KFAC(problem, "*ln*.g")


def test_a_loss_without_terms_is_said_before_the_work():
    problem = bench("custom-loss-pre-layernorm").problem
    with pytest.raises(UsageError, match="does not define its terms"):
        cs.KFAC(problem, kind="empirical")
    assert cs.KFAC(problem, kind="empirical", terms="together").trace() > 0
