"""One cross-entropy: by its name, as a class of ours, as torch's module or function, with every option.

Each form meets double backward through torch's own function, with the last linear map left to the loss
(engine "fast") and with all logits formed (engine "autograd"); and what else a loss can do is the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from oracles import drawn, relative_error, shaken

B, T, D, C = 3, 4, 2, 5
SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(B, T, D, generator=SOURCE, dtype=torch.float64)
V = torch.tensor([0.5, 2.0, 1.5, 0.0, 1.0], dtype=torch.float64)
Y = torch.randint(0, C, (B, T), generator=SOURCE)
SOFT = torch.randn(B, T, C, generator=SOURCE, dtype=torch.float64).softmax(-1)
W = torch.rand(B, T, generator=SOURCE, dtype=torch.float64)


def ignoring(value: int) -> Tensor:
    return Y.clone().index_put((torch.tensor([0, 2]), torch.tensor([1, 3])), torch.tensor(value))


class Net(nn.Module):
    """Logits (B, T, C), or the same with the classes on axis 1, as (B, C, T)."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis, self.inner = axis, nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, C))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).movedim(-1, self.axis)


class Last(nn.Module):
    """Logits of one position, (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(T * D, 3), nn.Tanh(), nn.Linear(3, C))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(1))


OPTIONS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "plain": ({}, ignoring(-100)),
    "weight": ({"weight": V}, ignoring(-100)),
    "ignore_index": ({"ignore_index": 2}, Y),
    "label_smoothing": ({"label_smoothing": 0.2}, ignoring(-100)),
    "weight and label_smoothing": ({"weight": V, "label_smoothing": 0.2}, ignoring(-100)),
    "weight and ignore_index": ({"weight": V, "ignore_index": -1}, ignoring(-1)),
    "probabilities": ({}, SOFT),
    "probabilities, all options": ({"weight": V, "label_smoothing": 0.2}, SOFT),
    "sum": ({"reduction": "sum"}, ignoring(-100)),
    "sum, all options": (
        {"weight": V, "ignore_index": -1, "label_smoothing": 0.2, "reduction": "sum"},
        ignoring(-1),
    ),
}
FORMS = ("ours", "module", "function")


def problem(form: str, options: dict[str, Any], y: Tensor, *, weights: Tensor | None = None) -> cs.Problem:
    """The same network and data, once with the classes on the last axis, else on axis 1."""
    module = shaken(drawn(lambda: Net(-1 if form == "ours" else 1)))
    if form == "ours":
        loss = cs.CrossEntropy(**options)
    else:
        loss = nn.CrossEntropyLoss(**options) if form == "module" else partial(F.cross_entropy, **options)
        y = y.movedim(-1, 1) if y.is_floating_point() else y
    return cs.Problem(module, cs.Batches.from_tensors(X, y, weights, batch_size=2), loss)


def matrices(
    module: nn.Module, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[float, Tensor, Tensor]:
    """Value, Hessian and GGN by double backward through torch's own cross-entropy."""
    leaves = list(module.parameters())

    def flat(s: Tensor, into: list[Tensor]) -> Tensor:
        found = torch.autograd.grad(s, into, create_graph=True, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for g, p in zip(found, into, strict=True)
            ]
        )

    z = module(x)
    value = F.cross_entropy(z, y, **options)
    H = torch.stack([flat(g, leaves) if g.requires_grad else torch.zeros(0) for g in flat(value, leaves)])
    J = torch.stack([flat(entry, leaves) for entry in z.flatten()])
    at = z.detach().requires_grad_()
    M = torch.stack([flat(g, [at]) for g in flat(F.cross_entropy(at, y, **options), [at])])
    return float(value.detach()), H.detach(), (J.T @ M @ J).detach()


def in_order(p: cs.Problem, truth: Tensor) -> Tensor:
    """A matrix over all parameters, one after the other, in the order of the problem's vectors."""
    sizes = [q.numel() for q in p.parameters()]
    columns = [
        p.space().gather(
            {n: t.view(q.shape) for (n, q), t in zip(p.named_parameters(), row.split(sizes), strict=True)}
        )
        for row in torch.eye(sum(sizes), dtype=torch.float64)
    ]
    P = torch.stack(columns, 1)
    return P @ truth @ P.T


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_meets_double_backward(form: str, name: str):
    options, y = OPTIONS[name]
    p = problem(form, options, y)
    theirs = y.movedim(-1, 1) if y.is_floating_point() else y
    module = shaken(drawn(lambda: Net(1)))
    value, H, G = matrices(module, X, theirs, options)
    assert p.loss_value() == pytest.approx(value, rel=1e-12)
    for engine in ("fast", "autograd"):
        assert relative_error(cs.Hessian(p, engine=engine).to_dense(), in_order(p, H)) < 1e-10
        assert relative_error(cs.GGN(p, engine=engine).to_dense(), in_order(p, G)) < 1e-10
        assert relative_error(cs.FunctionalHessian(p, engine=engine).to_dense(), in_order(p, H - G)) < 1e-10


@pytest.mark.parametrize("name", ["plain", "weight", "ignore_index", "probabilities", "sum"])
def test_one_position_without_an_axis_of_its_own(name: str):
    """Outputs (B, C), where the last axis is axis 1."""
    options, y = OPTIONS[name]
    module, y = shaken(drawn(Last)), y[:, 0]
    _, H, G = matrices(module, X, y, options)
    for loss in (cs.CrossEntropy(**options), nn.CrossEntropyLoss(**options)):
        p = cs.Problem(module, (X, y), loss)
        for engine in ("fast", "autograd"):
            assert relative_error(cs.Hessian(p, engine=engine).to_dense(), in_order(p, H)) < 1e-10
            assert relative_error(cs.GGN(p, engine=engine).to_dense(), in_order(p, G)) < 1e-10


@pytest.mark.parametrize("weights", [None, W], ids=["bare", "weighted"])
@pytest.mark.parametrize(
    "name", [n for n in OPTIONS if not ("label_smoothing" in OPTIONS[n][0] and "weight" in OPTIONS[n][0])]
)
def test_fishers_factors_and_single_terms_are_the_same(name: str, weights: Tensor | None):
    options, y = OPTIONS[name]
    ours, theirs = (problem(form, options, y, weights=weights) for form in ("ours", "module"))
    pairs = [(cs.EmpiricalFisher, {})]
    pairs += [
        (cs.KFAC, {"kind": k, "terms": t}) for k in ("ggn", "empirical") for t in ("separate", "together")
    ]
    if not options.keys() & {"weight", "label_smoothing"}:
        pairs += [(cs.MonteCarloFisher, {"num_samples": 2}), (cs.KFAC, {"kind": "mc", "terms": "separate"})]
    for make, settings in pairs:
        assert relative_error(make(theirs, **settings).to_dense(), make(ours, **settings).to_dense()) < 1e-10
    for operator in (cs.GGN, cs.EmpiricalFisher):
        diagonals = [cs.exact_diagonal(operator(p)) for p in (ours, theirs)]
        np.testing.assert_allclose(
            *(np.asarray(getattr(d, "values", d)) for d in diagonals), rtol=1e-9, atol=1e-14
        )
        dense = operator(ours).to_dense().diagonal().numpy()
        np.testing.assert_allclose(
            np.asarray(getattr(diagonals[0], "values", diagonals[0])), dense, rtol=1e-9, atol=1e-14
        )


@pytest.mark.parametrize("name", ["plain", "weight", "ignore_index", "probabilities", "label_smoothing"])
def test_samples_add_up_to_the_problem(name: str):
    """Σ_x (N_x/N) ℓ_x is the loss, over sequences and over single terms; each form has the same terms."""
    options, y = OPTIONS[name]
    forms = [problem(form, options, y, weights=W) for form in ("ours", "module")]
    for each in ("sequence", "term"):
        samples = [cs.per_sample(p, each=each) for p in forms]
        losses = [s.losses() for s in samples]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-12)
        np.testing.assert_allclose(samples[1].shares, samples[0].shares, rtol=1e-12)
        for p, s, own in zip(forms, samples, losses, strict=True):
            assert float(s.shares @ own) == pytest.approx(p.loss_value(), rel=1e-12)
            mean = torch.as_tensor(s.shares) @ s.gradients()
            assert relative_error(mean, p.gradient()) < 1e-10


def test_both_weights_and_smoothing_have_no_empirical_fisher():
    p = problem("ours", {"weight": V, "label_smoothing": 0.2}, Y)
    with pytest.raises(cs.UsageError, match="class weights and label_smoothing"):
        cs.EmpiricalFisher(p).to_dense()


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_never_formed_in_full(form: str):
    """With a wide head no tensor as large as all logits is made, whichever way the loss was given."""
    vocabulary, rows = 300_000, (2, 10)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(vocabulary, 2), nn.Linear(2, vocabulary, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            z = self.head(torch.tanh(self.embedding(ids)))
            return z if form == "ours" else z.transpose(1, 2)

    x = torch.randint(0, vocabulary, rows, generator=torch.Generator().manual_seed(0))
    loss = {
        "ours": "cross_entropy",
        "module": nn.CrossEntropyLoss(ignore_index=-1),
        "function": F.cross_entropy,
    }
    p = cs.Problem(drawn(Wide).float(), (x, x.roll(1, 1)), loss[form])
    cs.Hessian(p) @ torch.ones(p.space().size)  # the check at first use is on so few tokens that it may
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            made = found if isinstance(found, tuple) else (found,)
            sizes.extend(t.untyped_storage().nbytes() for t in made if isinstance(t, Tensor))
            return found

    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        with Watch():
            operator(p) @ torch.ones(p.space().size)
    assert max(sizes) < 20 * vocabulary * 4


def test_real_numbers_are_no_class_probabilities():
    """A regression without a loss is refused, not taken for a classification."""
    p = cs.Problem(drawn(lambda: Net(-1)), (X, X.sum(-1, keepdim=True).expand(-1, -1, C)))
    with pytest.raises(cs.UsageError, match="mse_mean"):
        p.loss_value()


def test_squared_errors_of_torch_are_mse_mean():
    """nn.MSELoss, F.mse_loss and "mse_mean": the same numbers and the same single terms."""
    module, y = shaken(drawn(lambda: Net(-1))), SOFT
    problems = [cs.Problem(module, (X, y, W), loss) for loss in ("mse_mean", nn.MSELoss(), F.mse_loss)]
    for p in problems[1:]:
        for make in (cs.Hessian, cs.GGN, cs.EmpiricalFisher, cs.MonteCarloFisher, cs.KFAC):
            assert relative_error(make(p).to_dense(), make(problems[0]).to_dense()) < 1e-12
        found, want = (cs.per_sample(q, each="term").losses() for q in (p, problems[0]))
        np.testing.assert_allclose(found, want, rtol=1e-12)
    total = cs.Problem(module, (X, y), nn.MSELoss(reduction="sum")).loss_value()
    assert total == pytest.approx(float(F.mse_loss(module(X), y, reduction="sum").detach()), rel=1e-12)
