"""torch's losses as they are: their own value, and their curvature by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from front_door import assert_meets_autograd, leaves_of
from oracles import drawn, relative_error, shaken
from selection import most
from wrong_calls import assert_one_sentence

SOURCE = torch.Generator().manual_seed(0)
C, L = 3, 2
V = torch.tensor([0.5, 2.0, 1.5])


def net(*, wide: bool = False, last: nn.Module | None = None) -> nn.Module:
    """(B, 3) to (B, C); `wide`, (B, 3, L) to (B, C, L)."""
    layer = (lambda i, o: nn.Conv1d(i, o, 1)) if wide else nn.Linear
    found = [layer(3, 2), nn.Tanh(), layer(2, C), *([last] if last else [])]
    return shaken(drawn(lambda: nn.Sequential(*found)))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=SOURCE, dtype=torch.float64)


X, WIDE = draw(5, 3), draw(4, 3, L)
CLASSES, WIDE_CLASSES = torch.tensor([0, 2, -100, 1, 2]), torch.tensor([[0, 1], [2, -1], [1, 1], [-1, 0]])
SOFT, WIDE_SOFT = draw(5, C).softmax(-1), draw(4, C, L).softmax(1)
REALS, COINS = draw(5, C), (draw(5, C) > 0).double()
LOGS, PROBABILITIES = partial(net, last=nn.LogSoftmax(1)), partial(net, last=nn.Sigmoid())
Case = tuple[Callable[..., Any], Callable[[], nn.Module], Tensor, Tensor]
CASES: dict[str, Case] = {
    "classes": (nn.CrossEntropyLoss, net, X, CLASSES),
    "smoothed": (partial(nn.CrossEntropyLoss, label_smoothing=0.2), net, X, CLASSES),
    "class weights": (partial(nn.CrossEntropyLoss, weight=V), net, X, CLASSES),
    "both": (partial(nn.CrossEntropyLoss, weight=V, label_smoothing=0.2), net, X, CLASSES),
    "classes on axis 1": (
        partial(nn.CrossEntropyLoss, weight=V, label_smoothing=0.1, ignore_index=-1),
        partial(net, wide=True),
        WIDE,
        WIDE_CLASSES,
    ),
    "soft": (nn.CrossEntropyLoss, net, X, SOFT),
    "soft, weighted, smoothed": (
        partial(nn.CrossEntropyLoss, weight=V, label_smoothing=0.2),
        partial(net, wide=True),
        WIDE,
        WIDE_SOFT,
    ),
    "nll": (partial(nn.NLLLoss, weight=V), LOGS, X, CLASSES),
    "nll on axis 1": (
        partial(nn.NLLLoss, ignore_index=-1),
        partial(net, wide=True, last=nn.LogSoftmax(1)),
        WIDE,
        WIDE_CLASSES,
    ),
    "bce": (partial(nn.BCELoss, weight=V), PROBABILITIES, X, COINS),
    "logits": (partial(nn.BCEWithLogitsLoss, pos_weight=V), net, X, COINS),
    "soft coins": (nn.BCEWithLogitsLoss, net, X, REALS.sigmoid()),
    "kl": (nn.KLDivLoss, LOGS, X, SOFT),
    "kl of logs": (partial(nn.KLDivLoss, log_target=True), LOGS, X, SOFT.log()),
    "mse": (nn.MSELoss, net, X, REALS),
    "huber": (partial(nn.HuberLoss, delta=0.7), net, X, REALS),
    "smooth": (partial(nn.SmoothL1Loss, beta=0.5), net, X, REALS),
    "l1": (nn.L1Loss, net, X, REALS),
    "poisson": (nn.PoissonNLLLoss, net, X, COINS),
    "margin": (nn.SoftMarginLoss, net, X, 2 * COINS - 1),
}
GRID = [(name, "mean") for name in CASES if name not in ("smoothed", "kl of logs")]
GRID += [(name, "sum") for name in ("both", "nll", "mse")]
GRID += [("kl of logs", "batchmean")]
LIKE_OTHERS = [(name, "mean") for name in ("classes", "class weights", "soft", "nll on axis 1", "soft coins")]
LIKE_OTHERS += [("both", "sum"), ("nll", "sum"), ("smooth", "mean"), ("logits", "mean")]


@pytest.mark.filterwarnings("ignore:reduction")  # torch's word on the mean of a KL
@pytest.mark.parametrize(("name", "reduction"), most(GRID, but=LIKE_OTHERS))
def test_a_loss_of_torch_meets_autograd(name: str, reduction: str):
    make, model, x, y = CASES[name]
    loss, module = make(reduction=reduction).double(), model()
    problems = [cs.Problem(module, data, loss) for data in ((x, y), [(x[:1], y[:1]), (x[1:], y[1:])])]
    assert_meets_autograd(
        problems,
        leaves_of(module),
        lambda: loss(module(x), y),
        outputs=lambda: module(x),
        of_outputs=lambda z: loss(z, y),
    )


@pytest.mark.parametrize("name", ["class weights", "nll", "classes on axis 1", "soft", "logits", "huber"])
def test_an_empirical_fisher_is_that_of_the_terms(name: str):
    """(1/N) Σ_t w_t g_t g_tᵀ over terms of torch's own, each asked alone."""
    make, model, x, y = CASES[name]
    if name == "classes on axis 1":
        make = partial(nn.CrossEntropyLoss, ignore_index=-1)
    loss, module = make().double(), model()
    p = cs.Problem(module, (x, y), loss)
    leaves, space = leaves_of(module), cs.load(module).space()
    alone, v = make(reduction="none").double(), getattr(loss, "weight", None)
    terms = alone(module(x), y)
    n = torch.ones_like(terms)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and not y.is_floating_point():
        counted = y != loss.ignore_index
        n = counted.double() if v is None else v[y * counted] * counted
    total = torch.zeros(space.size, space.size, dtype=torch.float64)
    for term, weight in zip(terms.flatten(), n.flatten(), strict=True):
        if weight:
            found = torch.autograd.grad(term / weight, list(leaves.values()), retain_graph=True)
            g = space.gather(dict(zip(leaves, found, strict=True)))
            total += weight * torch.outer(g, g)
    assert relative_error(cs.EmpiricalFisher(p).to_dense(), total / n.sum()) < 1e-10


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", CASES)
def test_a_root_is_that_of_the_second_derivative(name: str):
    """Σ_i (R e_i)(R e_i)ᵀ u = ∂²(sum)/∂z² u, sequence by sequence."""
    make, module, x, y = CASES[name]
    problem = cs.Problem(module(), (x, y), make().double())
    (batch,), loss = problem.placed_batches(""), problem.loss
    assert loss.has_root
    z = problem.outputs(batch).detach()
    units = torch.eye(z[0].numel(), dtype=z.dtype)[:, None].expand(-1, len(z), -1).reshape(-1, *z.shape)
    R = loss.root(z, batch.targets, batch.weights, units)
    u = draw(*z.shape)
    found = torch.einsum("kb,kb...->b...", (R * u).flatten(2).sum(-1), R)
    torch.testing.assert_close(found, loss.hessian_product(z, batch.targets, batch.weights, u))


def test_class_weights_are_weights_of_terms():
    """Every matrix is that of plain cross-entropy with the weights of the targets' classes."""
    module, y, v = net(), CLASSES.clamp(min=0), V.double()
    ours = cs.Problem(module, (X, y), nn.CrossEntropyLoss(weight=v))
    plain = cs.Problem(module, (X, y, v[y]), "cross_entropy")
    for operator in (cs.Hessian, cs.GGN, cs.EmpiricalFisher):
        assert relative_error(operator(ours).to_dense(), operator(plain).to_dense()) < 1e-12
    for kind in ("ggn", "empirical"):
        assert (
            relative_error(cs.KFAC(ours, kind=kind).to_dense(), cs.KFAC(plain, kind=kind).to_dense()) < 1e-10
        )
    bare = [cs.Problem(module, (X, y), loss) for loss in ("cross_entropy", nn.CrossEntropyLoss())]
    mc = [cs.KFAC(p, kind="mc", num_samples=3).to_dense() for p in bare]
    assert relative_error(mc[1], mc[0]) < 1e-10


def test_factors_of_entries_are_those_of_the_squared_error():
    module = net()
    ours, plain = cs.Problem(module, (X, REALS), nn.MSELoss()), cs.Problem(module, (X, REALS), "mse_mean")
    for kind in ("ggn", "empirical", "mc"):
        assert (
            relative_error(cs.KFAC(ours, kind=kind).to_dense(), cs.KFAC(plain, kind=kind).to_dense()) < 1e-10
        )


LIKELIHOODS = ["classes", "soft", "soft coins", "mse", "nll drawn", "bce drawn", "poisson"]


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_drawn_targets_are_those_of_the_likelihood(name: str):
    """The mean of r rᵀ over draws is the expectation of the Hessian in the outputs, within its error."""
    makes = {"nll drawn": (nn.NLLLoss, X[:, :1], CLASSES), "bce drawn": (nn.BCELoss, X, COINS)}
    make, _, y = makes[name] if name in makes else (CASES[name][0], None, CASES[name][3])
    loss, S = cs.losses.as_loss(make()), 4000
    z = REALS[:1]
    z = z.log_softmax(1) if name == "nll drawn" else z.sigmoid() if name == "bce drawn" else z
    many, source = z.expand(S, C), torch.Generator().manual_seed(1)
    y = loss.sample_targets(many, y[:1].expand(S, *y.shape[1:]), source)
    r = loss.gradient(many, y, None)
    u = torch.eye(C, dtype=torch.float64)
    p = z.exp()[0]  # for log-probabilities: the Fisher of the distribution, whose Hessian in them is zero
    expected = {"nll drawn": torch.diag(p), "bce drawn": torch.diag(1 / (z * (1 - z))[0])}.get(name)
    if expected is None:
        expected = loss.hessian_product(z, y[:1], None, u[:, None, :])[:, 0]
    outer = r[:, :, None] * r[:, None, :]
    assert bool(((outer.mean(0) - expected).abs() < 4.5 * outer.std(0) / S**0.5 + 1e-12).all())


def test_what_is_no_likelihood_says_so():
    y, z = CLASSES, REALS
    for make, target in (
        (partial(nn.CrossEntropyLoss, label_smoothing=0.1), y),
        (partial(nn.CrossEntropyLoss, weight=V), y),
        (nn.HuberLoss, z),
        (nn.KLDivLoss, SOFT),
        (partial(nn.BCEWithLogitsLoss, pos_weight=V), COINS),
    ):
        p = cs.Problem(net(), (X, target), make())
        for operator in (cs.MonteCarloFisher, cs.KFAC):
            with pytest.raises(cs.UsageError, match=r"log-likelihood.*kind='ggn' or 'empirical'") as caught:
                operator(p)
            assert_one_sentence(caught.value)
    smooth = cs.Problem(net(), (X, y.clamp(min=0)), cs.CrossEntropy(label_smoothing=0.1))
    with pytest.raises(cs.UsageError, match=r"with label_smoothing is not.*kind='ggn' or 'empirical'"):
        cs.KFAC(smooth)
    both = cs.Problem(net(), (X, y), nn.CrossEntropyLoss(weight=V.double(), label_smoothing=0.1))
    with pytest.raises(cs.UsageError, match="class weights and label_smoothing"):
        cs.EmpiricalFisher(both).to_dense()
    with pytest.raises(cs.UsageError, match="exponentials do not sum to 1"):
        cs.MonteCarloFisher(cs.Problem(net(), (X, y), nn.NLLLoss()))


def test_weights_of_the_data_go_with_those_of_the_loss():
    w, module = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0]).double(), net()
    y = CLASSES.clamp(min=0)
    v = V.double()
    p = cs.Problem(module, (X, y, w), nn.CrossEntropyLoss(weight=v))
    terms = F.cross_entropy(module(X).detach(), y, weight=v, reduction="none")
    assert p.loss_value() == pytest.approx(float((w * terms).sum() / (w * v[y]).sum()), rel=1e-12)
    huber = cs.Problem(module, (X, REALS, w), nn.HuberLoss())
    terms = F.huber_loss(module(X).detach(), REALS, reduction="none")
    assert huber.loss_value() == pytest.approx(float((w[:, None] * terms).sum() / (C * w.sum())), rel=1e-12)
    for own in (p, huber):
        u = torch.ones(own.space().size, dtype=torch.float64)
        parts = cs.GGN(own) @ u + cs.FunctionalHessian(own) @ u
        assert relative_error(parts, cs.Hessian(own) @ u) < 1e-10


def test_functions_and_partials_are_their_modules():
    module = net()
    pairs = [
        (F.cross_entropy, nn.CrossEntropyLoss(), CLASSES),
        (partial(F.cross_entropy, label_smoothing=0.1, reduction="sum"),
         nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), CLASSES),
        (F.mse_loss, nn.MSELoss(), REALS),
        (partial(F.huber_loss, delta=0.3), nn.HuberLoss(delta=0.3), REALS),
        (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(), COINS),
    ]  # fmt: skip
    for function, loss, y in pairs:
        theirs = float(loss(module(X), y).detach())
        assert cs.Problem(module, (X, y), function).loss_value() == pytest.approx(theirs, rel=1e-12)


def test_a_setting_of_the_loss_that_changes_is_seen():
    loss, module = nn.CrossEntropyLoss(), net()
    p = cs.Problem(module, (X, CLASSES), loss)
    H, v = cs.Hessian(p), torch.ones(p.space().size, dtype=torch.float64)
    before = H @ v
    loss.label_smoothing = 0.5
    assert p.loss_value() == pytest.approx(float(loss(module(X), CLASSES).detach()), rel=1e-12)
    after = cs.Hessian(cs.Problem(module, (X, CLASSES), nn.CrossEntropyLoss(label_smoothing=0.5))) @ v
    assert relative_error(H @ v, after) < 1e-12 < relative_error(before, after)


@pytest.mark.parametrize("operator", [cs.Hessian, cs.GGN])
def test_another_weight_of_a_loss_is_followed(operator: Any):
    """None for a tensor, a tensor for None, one tensor for another: each is the loss from then on."""
    loss, module = nn.CrossEntropyLoss(), net()
    op = operator(cs.Problem(module, (X, CLASSES), loss))
    u = torch.ones(op.shape[0], dtype=torch.float64)
    for weight in (V.double(), None, V.double() + 1, V.double() + 2, None):
        before, loss.weight = op @ u, weight
        fresh = operator(cs.Problem(module, (X, CLASSES), nn.CrossEntropyLoss(weight=weight))) @ u
        assert relative_error(op @ u, fresh) < 1e-12 < relative_error(before, fresh)


@pytest.mark.parametrize("past_autograd", [False, True])
def test_numbers_in_a_loss_that_change_are_seen(past_autograd: bool):
    """Also where the model was looked at with another loss, and in a class that no other term shows."""
    model, v = cs.load(net()), [torch.ones(3, dtype=torch.float64) for _ in range(2)]
    y = torch.tensor([0, 0, 1, 1, 2])
    problems = [cs.Problem(model, (X, y), nn.CrossEntropyLoss(weight=w, reduction="sum")) for w in v]
    u = torch.ones(model.num_parameters, dtype=torch.float64)
    for operator in (cs.Hessian, cs.GGN):
        first, second = map(operator, problems)
        for _ in range(4):  # enough for products that are recorded
            before = first @ u, second @ u
        (v[1].data if past_autograd else v[1])[2] += 4.0
        fresh = operator(cs.Problem(model, (X, y), nn.CrossEntropyLoss(weight=v[1], reduction="sum"))) @ u
        assert relative_error(second @ u, fresh) < 1e-12 < relative_error(before[1], fresh)
        assert torch.equal(first @ u, before[0])


def test_a_loss_without_curvature_says_so():
    p = cs.Problem(LOGS(), (X, SOFT), nn.KLDivLoss(reduction="batchmean"))
    assert "the GGN is zero" in p.notes[-1]
    assert not (cs.GGN(p) @ torch.ones(p.space().size, dtype=torch.float64)).any()


class Focal(nn.CrossEntropyLoss):
    """A class of one's own."""


def with_forward() -> nn.MSELoss:
    """torch's loss with another forward."""
    loss = nn.MSELoss()
    loss.forward = lambda input, target: 7 * F.mse_loss(input, target)
    return loss


def with_hook() -> nn.MSELoss:
    """torch's loss with a hook that changes its value."""
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda _, __, value: 5 * value)
    return loss


REFUSED: dict[str, tuple[Any, Tensor, str]] = {
    "none": (nn.MSELoss(reduction="none"), REALS, "'mean' or 'sum', got 'none': a loss is one number"),
    "class": (nn.MSELoss, REALS, "got the class MSELoss .*MSELoss()"),
    "own class": (Focal(), CLASSES, "Focal .*cs.CustomLoss"),
    "own forward": (with_forward(), REALS, "forward or hooks .*cs.CustomLoss"),
    "hook": (with_hook(), REALS, "forward or hooks .*cs.CustomLoss"),
    "function": (lambda z, y: z.sum(), REALS, "got the function <lambda> .*loss_fn"),
    "two inputs": (nn.TripletMarginLoss(), REALS, "TripletMarginLoss"),
    "option": (partial(F.mse_loss, delta=1), REALS, "expected options of MSELoss"),
    "shape": (
        nn.MSELoss(),
        REALS[:, :1],
        r"real targets of the outputs' shape \(5, 3\), got float64 \(5, 1\)",
    ),
    "integers": (nn.BCEWithLogitsLoss(), COINS.long(), "got int64"),
    "shares": (nn.BCEWithLogitsLoss(), REALS, "targets from 0 to 1 for BCEWithLogitsLoss, got -"),
    "probabilities": (nn.BCELoss(), COINS, "outputs from 0 to 1 for BCELoss"),
    "range": (nn.CrossEntropyLoss(), CLASSES + 1, r"below 3 \(or ignore_index -100\), got values from -99"),
    "other ignored": (nn.CrossEntropyLoss(ignore_index=-1), CLASSES, "got values from -100 to 2"),
    "soft nll": (nn.NLLLoss(), SOFT, r"expected integer targets \(5,\) for outputs \(5, 3\)"),
    "last axis": (nn.CrossEntropyLoss(), WIDE_CLASSES[:, :1].expand(4, 3), "on the last axis"),
    "weight of sequences": (nn.BCELoss(weight=COINS), COINS, r"fits the entries \(3,\) of one sequence"),
    "other entries": (nn.BCEWithLogitsLoss(pos_weight=V[:2]), COINS, r"a pos_weight .* got \(2,\)"),
    "other classes": (nn.CrossEntropyLoss(weight=V[:2]), CLASSES, r"each of 3 classes .* got \(2,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_odd_losses_are_refused_in_one_sentence(name: str):
    loss, y, message = REFUSED[name]
    module, x = (net(wide=True), WIDE) if name == "last axis" else (net(), X)
    module = PROBABILITIES() if name == "weight of sequences" else module
    with pytest.raises(cs.UsageError, match=message) as caught:
        cs.Problem(module, (x, y), loss).loss_value()
    assert_one_sentence(caught.value)


def test_training_on_a_sum_is_not_divided():
    from curvescope.train import TrainConfig, train

    module = net()
    loss = nn.MSELoss(reduction="sum")
    _, history, _ = train(cs.load(module), cs.Batches.from_tensors(X, REALS), TrainConfig(steps=1), loss=loss)
    assert history.loss[0] == pytest.approx(float(loss(module(X), REALS).detach()), rel=1e-12)
