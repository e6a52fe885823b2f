"""Losses: sums, gradients and Hessians in the outputs against terms written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvescope as cs
import oracles
from curvescope.losses import CrossEntropy, CustomLoss, SquaredError, as_loss
from oracles import relative_error
from selection import a_half

SHAPES = {"tokens": (3, 4, 5), "classes": (3, 5)}
KINDS = list(oracles.TERMS)


def example(kind: str, shape: tuple[int, ...], weights: str) -> tuple[Tensor, Tensor, Tensor | None]:
    source = torch.Generator().manual_seed(0)
    z = torch.randn(shape, generator=source, dtype=torch.float64)
    if kind in ("cross_entropy", "smoothed"):
        y = torch.randint(0, shape[-1], shape[:-1], generator=source)
        y.view(-1)[1] = -100
    else:
        y = torch.randn(shape, generator=source, dtype=torch.float64)
    chosen = {"none": None, "sequence": shape[:1], "term": tuple(y.shape)}[weights]
    w = None if chosen is None else torch.rand(chosen, generator=source, dtype=torch.float64)
    return z, y, w


def by_hand(kind: str, z: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    return sum(weight * loss for loss, weight in oracles.weighted_terms(kind, z, y, w))


GRID = [
    (kind, shape, weights)
    for kind in KINDS
    for shape in SHAPES
    for weights in ("none", "sequence", "term")
    if not (kind == "mse" and weights == "term") and not (kind == "custom" and weights != "none")
]


@pytest.mark.parametrize(("kind", "shape", "weights"), a_half(GRID, shift=0))
def test_sum_and_derivatives(kind: str, shape: str, weights: str):
    z, y, w = example(kind, SHAPES[shape], weights)
    loss = as_loss(oracles.as_package_loss(kind))
    assert float(loss.sum(z, y, w)) == pytest.approx(float(by_hand(kind, z, y, w)), rel=1e-13)
    count = sum(weight for _, weight in oracles.weighted_terms(kind, z, y, w))
    assert loss.total_weight(y, w) == pytest.approx(count, rel=1e-14)
    slope = torch.func.grad(lambda t: by_hand(kind, t, y, w))(z)
    assert relative_error(loss.gradient(z, y, w), slope) < 1e-12
    bend = torch.func.jacfwd(torch.func.grad(lambda t: by_hand(kind, t, y, w)))(z)
    bend = bend.reshape(z.numel(), z.numel())
    for lead in ((), (2,), (2, 3)):
        u = torch.randn(*lead, *z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = loss.hessian_product(z, y, w, u)
        assert found.shape == u.shape
        assert relative_error(found.reshape(-1, z.numel()), u.reshape(-1, z.numel()) @ bend) < 1e-12


@pytest.mark.parametrize(("kind", "shape", "weights"), GRID)
def test_outer_product_of_terms(kind: str, shape: str, weights: str):
    z, y, w = example(kind, SHAPES[shape], weights)
    total = torch.zeros(z.numel(), z.numel(), dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    for term, weight in oracles.weighted_terms(kind, leaf, y, w):
        (r,) = torch.autograd.grad(term, leaf, retain_graph=True)
        total += weight * torch.outer(r.flatten(), r.flatten())
    u = torch.randn(3, *z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = as_loss(oracles.as_package_loss(kind)).term_outer_product(z, y, w, u)
    assert found.shape == u.shape
    assert relative_error(found.reshape(3, -1), u.reshape(3, -1) @ total) < 1e-12


@pytest.mark.parametrize("kind", ["mse", "mse_mean"])
def test_squared_error_of_one_number_per_sequence(kind: str):
    z, y, w = (torch.arange(1.0, 4.0, dtype=torch.float64) * s for s in (1.0, -0.3, 0.5))
    loss, u = as_loss(kind), torch.eye(3, dtype=torch.float64)
    assert float(loss.sum(z, y, w)) == pytest.approx(float((w * (z - y) ** 2).sum()))
    torch.testing.assert_close(loss.hessian_product(z, y, w, u), torch.diag(2 * w))
    torch.testing.assert_close(loss.term_outer_product(z, y, w, u), torch.diag(4 * w * (z - y) ** 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_type_of_targets(dtype: torch.dtype):
    z, y, _ = example("cross_entropy", SHAPES["tokens"], "none")
    y = y.clamp(min=0)
    loss = CrossEntropy()
    torch.testing.assert_close(loss.sum(z, y.to(dtype), None), loss.sum(z, y, None))
    torch.testing.assert_close(loss.gradient(z, y.to(dtype), None), loss.gradient(z, y, None))


def test_cross_entropy_of_huge_logits_is_finite():
    z = torch.tensor([[1e4, -1e4, 0.0]], dtype=torch.float64)
    loss, y = CrossEntropy(), torch.tensor([1])
    assert float(loss.sum(z, y, None)) == pytest.approx(2e4)
    torch.testing.assert_close(loss.gradient(z, y, None), torch.tensor([[1.0, -1.0, 0.0]]).double())
    assert not loss.hessian_product(z, y, None, torch.ones_like(z)).any()


def test_ignored_targets_contribute_nothing():
    z, y, _ = example("cross_entropy", SHAPES["tokens"], "none")
    y[:] = -100
    for loss in (CrossEntropy(), CrossEntropy(label_smoothing=0.3)):
        assert float(loss.sum(z, y, None)) == 0.0
        assert loss.total_weight(y, None) == 0.0
        assert not loss.gradient(z, y, None).any()
        assert not loss.hessian_product(z, y, None, torch.ones_like(z)).any()
        assert not loss.term_outer_product(z, y, None, torch.ones_like(z)).any()


def test_total_weight_is_summed_in_double_precision():
    w = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0))
    truth = float(w.double().sum())
    assert CrossEntropy().total_weight(torch.zeros(1000, 3, dtype=torch.long), w) == pytest.approx(
        truth, rel=1e-14
    )
    real = torch.zeros(1000, 3)
    assert SquaredError("mean").total_weight(real, w) == pytest.approx(truth, rel=1e-14)
    assert SquaredError("theory").total_weight(real, w[:, 0]) == pytest.approx(
        float(w[:, 0].double().sum()), rel=1e-14
    )


def test_drawn_classes_follow_the_softmax_and_keep_what_is_ignored():
    z = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64).expand(20000, 3)
    y = torch.zeros(20000, dtype=torch.long)
    y[:5] = -100
    drawn = CrossEntropy().sample_targets(z, y, torch.Generator().manual_seed(0))
    assert bool((drawn[:5] == -100).all())
    frequency = torch.bincount(drawn[5:], minlength=3) / 19995
    p = z[0].softmax(-1)
    assert bool(((frequency - p).abs() < 4 * (p * (1 - p) / 19995).sqrt()).all())


@pytest.mark.parametrize("kind", ["theory", "mean"])
def test_drawn_numbers_are_those_of_the_log_likelihood(kind: str):
    """E[r rᵀ] over draws is the Hessian of the loss in the outputs."""
    z = torch.zeros(4000, 2, 3, dtype=torch.float64)
    loss = SquaredError(kind)
    drawn = loss.sample_targets(z, z, torch.Generator().manual_seed(0))
    bend = loss.hessian_product(z, z, None, torch.ones_like(z))[0, 0, 0]
    r = loss.gradient(z, drawn, None)
    n = r.numel()
    assert abs(float(r.mean())) < 4 * float(bend) ** 0.5 / n**0.5
    assert abs(float(r.var() / bend) - 1) < 4 * (2 / n) ** 0.5


def test_smoothed_and_custom_losses_have_no_monte_carlo_fisher():
    z, y, _ = example("cross_entropy", SHAPES["tokens"], "none")
    with pytest.raises(cs.UsageError, match="with label_smoothing is not"):
        CrossEntropy(label_smoothing=0.1).sample_targets(z, y, torch.Generator())
    custom = CustomLoss(lambda z, y, w: z.sum(), lambda y, w: 1, name="mine")
    with pytest.raises(cs.UsageError, match="log-likelihood, which the loss 'mine' is not"):
        custom.sample_targets(z, y, torch.Generator())
    with pytest.raises(cs.UsageError, match="'mine' has no separate terms"):
        custom.term_outer_product(z, y, None, z)


def test_a_custom_loss_that_is_linear_has_no_hessian():
    z = torch.ones(2, 3, dtype=torch.float64)
    custom = CustomLoss(lambda z, y, w: 2 * z.sum(), lambda y, w: 6)
    assert not custom.hessian_product(z, z, None, torch.ones(4, 2, 3, dtype=torch.float64)).any()
    assert bool((custom.gradient(z, z, None) == 2).all())


def test_the_ggn_of_a_loss_that_is_not_convex_is_not_called_positive():
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).double()
    concave = cs.CustomLoss(lambda z, y, w: -(z * z).sum(), lambda y, w: len(y))
    G = cs.GGN(
        cs.Problem(oracles.shaken(oracles.drawn(lambda: torch.nn.Linear(2, 1))), (x, x[:, :1]), concave)
    )
    assert float(torch.linalg.eigvalsh(G.to_dense())[0]) < -0.1
    assert not G.psd


def test_losses_by_name():
    assert as_loss("cross_entropy") == CrossEntropy()
    assert as_loss("mse") == SquaredError("theory")
    assert as_loss("mse_mean") == SquaredError("mean")
    assert [as_loss(name).name for name in ("cross_entropy", "mse", "mse_mean")] == [
        "cross_entropy",
        "mse",
        "mse_mean",
    ]


def test_mse_and_mse_mean_are_the_same_mean_without_weights():
    z, y, _ = example("mse", SHAPES["tokens"], "none")
    values = [
        float(as_loss(n).sum(z, y, None)) / as_loss(n).total_weight(y, None) for n in ("mse", "mse_mean")
    ]
    assert (
        values[0]
        == pytest.approx(values[1], rel=1e-14)
        == pytest.approx(float(((z - y) ** 2).mean()), rel=1e-14)
    )


@pytest.mark.parametrize("misfit", ["shape", "float", "range"])
@pytest.mark.parametrize(
    "method",
    [
        "sum",
        "gradient",
        "term_outer_product",
        "hessian_product",
        "sample_targets",
    ],
)
def test_every_method_of_cross_entropy_checks_its_targets(method: str, misfit: str):
    z = torch.zeros(4, 4, 5, dtype=torch.float64)
    y = {
        "shape": torch.zeros(4, dtype=torch.long),
        "float": torch.zeros(4, 4),
        "range": torch.full((4, 4), 5),
    }[misfit]
    rest = {
        "hessian_product": (None, z),
        "term_outer_product": (None, z),
        "sample_targets": (torch.Generator(),),
    }
    with pytest.raises(cs.UsageError, match="expected"):
        getattr(CrossEntropy(), method)(z, y, *rest.get(method, (None,)))


def test_a_byte_of_156_is_a_class_in_every_method():
    """−100 and 156 are the same byte."""
    z = torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, loss = torch.tensor([156, 3, 7], dtype=torch.uint8), CrossEntropy()
    assert loss.total_weight(y, None) == 3
    assert loss.total_weight(y, torch.tensor([2.0, 1.0, 1.0])) == 4
    torch.testing.assert_close(loss.gradient(z, y, None), loss.gradient(z, y.long(), None))
    u = torch.ones_like(z).cumsum(-1)
    for method in (loss.hessian_product, loss.term_outer_product):
        torch.testing.assert_close(method(z, y, None, u), method(z, y.long(), None, u))


def test_drawn_classes_do_not_wrap_in_small_integers():
    z = torch.zeros(4, 300, dtype=torch.float64)
    z[:, 299] = 100.0
    drawn = CrossEntropy().sample_targets(
        z, torch.zeros(4, dtype=torch.uint8), torch.Generator().manual_seed(0)
    )
    assert drawn.tolist() == [299] * 4


def test_a_custom_loss_takes_a_weight_per_sequence_of_many_terms():
    z, y, w = example("mse_mean", SHAPES["tokens"], "sequence")
    custom = CustomLoss(
        lambda z, y, w: (w[:, None, None] * (z - y) ** 2).sum(),
        lambda y, w: float(w.sum()) * y[0].numel(),
        terms=lambda z, y: (z - y) ** 2,
    )
    expected = SquaredError("mean").term_outer_product(z, y, w, z)
    torch.testing.assert_close(custom.term_outer_product(z, y, w, z), expected)


def test_a_custom_loss_that_is_constant_has_no_derivatives():
    z = torch.ones(2, 3, dtype=torch.float64)
    custom = CustomLoss(lambda z, y, w: y.sum(), lambda y, w: 6)
    assert not custom.gradient(z, z, None).any()
    assert not custom.hessian_product(z, z, None, z).any()


Z = torch.zeros(2, 3, dtype=torch.float64)
REFUSED = {
    "sum with axes": (
        lambda: CustomLoss(lambda z, y, w: z, lambda y, w: 1).sum(Z, Z, None),
        r"got a tensor \(2, 3",
    ),
    "sum is a float": (
        lambda: CustomLoss(lambda z, y, w: 1.0, lambda y, w: 1).sum(Z, Z, None),
        "got a float",
    ),
    "count is nan": (
        lambda: CustomLoss(lambda z, y, w: z.sum(), lambda y, w: float("nan")).total_weight(Z, None),
        "expected a number of terms from the loss 'custom', got nan",
    ),
    "no functions": (lambda: CustomLoss(None, None), "expected two functions"),
    "tree for classes": (lambda: CrossEntropy().total_weight((Z, Z), None), "one tensor, got a tuple"),
    "tree for numbers": (lambda: SquaredError().total_weight({"a": Z}, None), "one tensor, got a dict"),
    "tree in the sum": (lambda: SquaredError().sum(Z, (Z,), None), "one tensor, got a tuple"),
    "smoothing": (lambda: CrossEntropy("a"), r"label_smoothing in \[0, 1\), got a"),
    "normalization": (lambda: SquaredError("sum"), "expected 'theory' or 'mean', got 'sum'"),
    "complex classes": (
        lambda: CrossEntropy().sum(Z, torch.zeros(2, dtype=torch.complex64), None),
        "expected integer targets",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_odd_losses_are_refused_in_one_sentence(make, message: str):
    with pytest.raises(cs.UsageError, match=message):
        make()
