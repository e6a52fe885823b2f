"""Curvature of single samples: against problems of one sequence each, and summed up against the operators."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
import oracles
from curvescope.core.errors import ShapeError, UsageError
from curvescope.operators import PerSample
from curvescope.operators.samples import stacked
from curvescope.operators.samples.stacked import Part
from oracles import as_batches, bench, cut, make_data, relative_error
from selection import some

EXACT = 1e-12
FEW = 3  # products that meet an operator of their own; the sum meets all
OPERATORS: dict[Part, type] = {"hessian": cs.Hessian, "ggn": cs.GGN}
RAGGED = "post-layernorm-relu-ignored"
OFTEN: list[tuple[str, Part]] = [
    ("merged-alibi-scaled-residual", "hessian"),
    ("patches-to-class", "ggn"),
    ("plain-attention-tied", "hessian"),
    ("mlp-relu-mse", "ggn"),
]
REST = [(name, part) for name in oracles.NAMES for part in OPERATORS if (name, part) not in OFTEN]


def singles(problem: cs.Problem) -> list[cs.Problem]:
    """The plain oracle: a problem of every sequence that counts."""
    ones = [batch[i : i + 1] for batch in problem.batches for i in range(batch.num_sequences)]
    counted = [one for one in ones if problem.loss.total_weight(one.targets, one.weights) > 0]
    return [cs.Problem(problem.model, [one], problem.loss) for one in counted]


def check(samples: PerSample, alone: list[cs.Problem], V: Tensor, part: Part) -> None:
    """Losses, gradients and products of each, and their weighted sums."""
    problem, shares = samples.problem, torch.as_tensor(samples.shares)
    assert samples.num_samples == len(alone)
    assert abs(samples.losses() - np.array([one.loss_value() for one in alone])).max() < EXACT
    gradients = samples.gradients()
    assert relative_error(gradients, torch.stack([one.gradient() for one in alone])) < EXACT
    products = samples.products(V, part)
    make = OPERATORS[part]
    for found, one in list(zip(products, alone, strict=True))[:FEW]:
        assert relative_error(found, make(one, engine="autograd") @ V) < EXACT
    assert relative_error(shares @ gradients, problem.gradient()) < EXACT
    assert relative_error(torch.einsum("s,snk->nk", shares, products), make(problem) @ V) < EXACT


@pytest.mark.parametrize(("name", "part"), some([*OFTEN, *REST], few=len(OFTEN)))
def test_samples_are_problems_of_one_sequence_each(name: str, part: Part):
    found = bench(name)
    data = cut(make_data(found.case), [3, 1, 1])[:2]
    problem = cs.Problem(found.model, as_batches(data), found.problem.loss)
    check(cs.per_sample(problem), singles(problem), found.probe(2), part)


def test_the_zoo_and_torch_s_layer_norm_are_taken_together():
    for name in ("merged-alibi-scaled-residual", "plain-normed-mlp", "plain-attention-tied"):
        found = bench(name)
        batch = found.problem.batches[1]
        graph = stacked.stacked_graph(found.problem, found.problem.space(), batch)
        assert graph is not None, name
        assert stacked.agrees(graph, second_order=True), name


def ragged() -> cs.Problem:
    """Batches of different lengths; one sequence counts nowhere, and one batch."""
    found = bench(RAGGED)
    x, y, _ = make_data(found.case)
    y = y.clone()
    y[1] = -100
    w = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    w[2, 0] = 0.0
    nothing = cs.Batch(x[:1], torch.full_like(y[:1], -100), w[:1])
    data = [cs.Batch(x[:3], y[:3], w[:3]), nothing, cs.Batch(x[3:, :3], y[3:, :3], w[3:, :3])]
    return cs.Problem(found.model, data)


def test_ragged_weighted_data_and_a_sequence_that_does_not_count():
    problem = ragged()
    samples = cs.per_sample(problem)
    assert samples.sequences.tolist() == [0, 2, 4, 5]
    assert samples.shares.sum() == pytest.approx(1, abs=EXACT)
    check(samples, singles(problem), bench(RAGGED).probe(2), "hessian")


@pytest.mark.parametrize("part", some(list(OPERATORS), few=1))
def test_terms_are_problems_of_one_target_each(part: Part):
    problem = ragged()
    samples = cs.per_sample(problem, each="term")
    alone = []
    for batch in problem.batches:
        assert batch.weights is not None
        for place in ((batch.targets != -100) & (batch.weights > 0)).nonzero().tolist():
            one = torch.full_like(batch.targets, -100)
            one[tuple(place)] = batch.targets[tuple(place)]
            alone.append(cs.Problem(problem.model, [cs.Batch(batch.inputs, one)]))
    check(samples, alone, bench(RAGGED).probe(1), part)


def test_terms_of_a_mean_over_entries():
    found = bench("plain-normed-mlp")
    samples = cs.per_sample(found.problem, each="term")
    assert samples.num_samples == 5 * 4 * 2
    V = found.probe(1)
    total = torch.einsum("s,snk->nk", torch.as_tensor(samples.shares), samples.products(V))
    assert relative_error(total, cs.Hessian(found.problem) @ V) < EXACT
    assert samples.losses() @ samples.shares == pytest.approx(found.problem.loss_value(), abs=EXACT)


def test_blocks_own_vectors_and_cuts_of_the_samples():
    found = bench("wide-heads")
    blocks = ("L0.W_Q", "L*.ln1.g", "L0.h1.W_V")
    whole = cs.per_sample(found.problem, *blocks)
    H = cs.Hessian(found.problem, *blocks)
    V = torch.randn(5, H.shape[0], 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    shared = whole.products(V[0])
    total = torch.einsum("s,snk->nk", torch.as_tensor(whole.shares), shared)
    assert relative_error(total, H @ V[0]) < EXACT
    own = whole.products(V)
    assert relative_error(own[0], shared[0]) < EXACT
    cases: list[tuple[int, Part]] = [(1, "hessian"), (2, "hessian"), (1, "ggn")]
    for chunk, part in cases:
        parts = cs.per_sample(found.problem, *blocks, chunk=chunk)
        assert relative_error(parts.products(V, part), whole.products(V, part)) < EXACT
    forms = torch.einsum("snk,snk->sk", V, own)
    assert relative_error(torch.as_tensor(whole.forms(V)), forms) < EXACT


def test_norms_inner_products_and_traces():
    found = bench("plain-normed-mlp")
    samples = cs.per_sample(found.problem, "*norm*")
    g, V = samples.gradients(), torch.eye(samples.space.size, dtype=torch.float64)[:, :3]
    assert abs(samples.gradient_norms() - g.norm(dim=1).numpy()).max() < EXACT
    assert abs(samples.gradient_products(V) - (g @ V).numpy()).max() < EXACT
    n = samples.space.size
    exact = samples.traces(num_probes=n)
    dense = samples.products(torch.eye(n, dtype=torch.float64))
    truth = dense.diagonal(dim1=1, dim2=2).sum(1).numpy()
    assert exact.exact
    assert abs(exact.values - truth).max() < EXACT
    estimate = samples.traces(num_probes=n - 1, seed=4)
    assert not estimate.exact
    assert (abs(estimate.values - truth) < 4.5 * estimate.stderr).all()


class Looks(nn.Module):
    """Looks at its numbers, which nothing batched can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = bench("plain-normed-mlp").module

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.sum()) > -1e9 else x


class Holds(nn.Module):
    """Holds its parameter in a second way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.7], dtype=torch.float64))
        self.second = lambda: self.weight if False else kept[0]
        kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) * self.second()


@pytest.mark.parametrize("make", [Looks, Holds])
def test_modules_that_cannot_be_batched_are_taken_one_by_one(make: type[nn.Module]):
    source = torch.Generator().manual_seed(0)
    width = 3 if make is Looks else 2
    x, y = (torch.randn(3, 4, d, generator=source, dtype=torch.float64) for d in (width, 2))
    problem = cs.Problem(make(), (x, y), "mse_mean")
    V = torch.randn(problem.space().size, 2, generator=source, dtype=torch.float64)
    check(cs.per_sample(problem), singles(problem), V, "hessian")


def test_losses_at_other_parameters():
    found = bench("plain-normed-mlp")
    moved = {name: 1.1 * p.detach() for name, p in found.problem.named_parameters()}
    there = [one.at(moved).loss_value() for one in singles(found.problem)]
    assert abs(cs.per_sample(found.problem).losses(moved) - np.array(there)).max() < EXACT
    elsewhere = cs.per_sample(found.problem.at(moved))
    assert abs(elsewhere.losses() - np.array(there)).max() < EXACT
    total = torch.einsum("s,snk->nk", torch.as_tensor(elsewhere.shares), elsewhere.products(found.probe(1)))
    assert relative_error(total, cs.Hessian(found.problem.at(moved)) @ found.probe(1)) < EXACT
    x = torch.ones(2, 4, 2, dtype=torch.float64)
    held = cs.per_sample(cs.Problem(Holds(), (x, x), "mse_mean"))
    with pytest.raises(UsageError, match="in a closure or a list"):
        held.losses({"weight": torch.zeros(2, dtype=torch.float64)})


def test_what_is_refused():
    problem = bench("real-to-real-identity").problem
    with pytest.raises(UsageError, match="terms within a sequence"):
        cs.per_sample(problem, each="term")
    with pytest.raises(UsageError, match="'sequence' or 'term'"):
        cs.per_sample(problem, each="token")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="chunk"):
        cs.per_sample(problem, chunk=0)
    samples = cs.per_sample(problem)
    with pytest.raises(ShapeError, match="expected columns"):
        samples.products(torch.zeros(3, 1, dtype=torch.float64))
    with pytest.raises(ShapeError, match="expected columns"):
        samples.gradient_products(torch.zeros(5, samples.space.size, 1, dtype=torch.float64))


class Coupled(nn.Module):
    """Every sequence sees the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z + z.mean(0, keepdim=True) ** 2


def test_sequences_that_see_each_other_are_refused():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = cs.Problem(Coupled().double(), (x, torch.tensor([0, 1, 0, 1])))
    for ask in (cs.per_sample(problem).losses, cs.per_sample(problem).gradients):
        with pytest.raises(cs.UsageError, match="depend on the other sequences"):
            ask()
    one_by_one = [(x[i : i + 1], torch.tensor([i % 2])) for i in range(4)]
    assert len(cs.per_sample(cs.Problem(Coupled().double(), one_by_one)).losses()) == 4


def test_a_loss_over_pairs_of_sequences_is_refused():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = cs.CustomLoss(lambda z, y, w: (z @ z.T).logsumexp(-1).sum(), lambda y, w: len(y))
    problem = cs.Problem(nn.Linear(3, 2).double(), (x, torch.zeros(4, dtype=torch.float64)), loss)
    with pytest.raises(cs.UsageError, match="the loss of a sequence"):
        cs.per_sample(problem).losses()


class Lookup(nn.Module):
    """Embeds ids in one of several ways; `kind` says what may differ under vmap."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        self.kind = kind
        self.E, self.P = (
            nn.Parameter(torch.randn(5, 3, generator=source, dtype=torch.float64)) for _ in range(2)
        )
        self.W = nn.Parameter(torch.randn(3, 3, generator=source, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("kept", torch.zeros(4, 3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "operator":
            h = torch.ops.aten.embedding(self.E, x, 0)
        elif self.kind == "torch":
            h = torch.embedding(self.E, x, 0)
        elif self.kind == "bag":
            h = F.embedding_bag(x.reshape(-1, 1), self.E, mode="sum", padding_idx=0).reshape(*x.shape, 3)
        else:
            h = F.embedding(x, self.E, padding_idx=-5)
        if self.kind == "several":
            h = h + F.embedding(x, self.P, padding_idx=3)
        if self.kind == "buffer":
            h = h * self.get_buffer("seen").fill_(1.3)[:3]
        if self.kind == "cache":  # as the first Llama kept its keys
            self.get_buffer("kept")[: len(x), : x.shape[-1]] = h
            h = self.get_buffer("kept")[: len(x), : x.shape[-1]]
        if self.kind == "sparse":
            h = torch.stack([(torch.eye(3, dtype=h.dtype).to_sparse() @ row.T).T for row in h])
        if self.kind == "branch" and bool((x < 5).all()):
            h = 2 * h
        if self.kind == "dropout":
            h = F.dropout(h, 0.5, self.training)
        return torch.tanh(h @ self.W) @ self.E.T  # tied


def by_hand(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian product of one sequence, by double backward."""
    into = list(model.parameters())
    loss = F.cross_entropy(model(x[None])[0], y)
    g = torch.autograd.grad(loss, into, create_graph=True, materialize_grads=True)
    flat = torch.cat([part.flatten() for part in g])
    second = torch.autograd.grad(flat @ v, into, materialize_grads=True)
    return flat.detach(), torch.cat([part.flatten() for part in second])


KINDS = ["function", "torch", "operator", "several", "buffer", "cache", "sparse", "branch", "dropout"]
FIRST_ORDER = ["bag"]  # PyTorch has no second derivative of it
PLACES = {"last": [3], "first": [0], "all": [0, 1, 2, 3], "none": []}


@pytest.mark.filterwarnings("ignore:torch.func.vmap computes")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [*KINDS, *FIRST_ORDER])
def test_samples_are_those_of_a_loop_wherever_padding_is(kind: str, place: str):
    source = torch.Generator().manual_seed(0)
    x, y = torch.randint(1, 5, (4, 3), generator=source), torch.randint(0, 5, (4, 3), generator=source)
    x[PLACES[place], 1] = 0
    model = Lookup(kind).eval()
    samples = cs.per_sample(cs.Problem(model, (x, y)))
    v = torch.randn(samples.space.size, generator=source, dtype=torch.float64)
    if kind in FIRST_ORDER:
        into = list(model.parameters())
        truth = [
            torch.autograd.grad(F.cross_entropy(model(a[None])[0], b), into, materialize_grads=True)
            for a, b in zip(x, y, strict=True)
        ]
        g = torch.stack([torch.cat([part.flatten() for part in one]) for one in truth])
        assert relative_error(samples.gradients(), g) < EXACT
        return
    model.get_buffer("kept").detach_()
    hand = [by_hand(copy.deepcopy(model), a, b, v) for a, b in zip(x, y, strict=True)]
    assert relative_error(samples.gradients(), torch.stack([g for g, _ in hand])) < EXACT
    assert relative_error(samples.products(v[:, None])[..., 0], torch.stack([h for _, h in hand])) < EXACT


def test_derivatives_that_vmap_gets_wrong_are_computed_one_at_a_time_with_a_warning():
    x, y = torch.tensor([[1, 2], [3, 4], [2, 0]]), torch.tensor([[1, 2], [0, 4], [3, 3]])
    with pytest.warns(UserWarning, match="one at a time"):
        cs.per_sample(cs.Problem(Lookup("operator"), (x, y))).gradients()


@pytest.mark.parametrize("make", [cs.GGN, cs.EmpiricalFisher, cs.MonteCarloFisher])
def test_exact_diagonals_leave_the_padding_row_out(make: type):
    x, y = torch.tensor([[1, 2], [3, 4], [2, 0]]), torch.tensor([[1, 2], [0, 4], [3, 3]])
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Tanh(), nn.Linear(3, 5)).double()
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))  # pyright: ignore
    op = make(cs.Problem(model, (x, y)))
    values = torch.as_tensor(cs.exact_diagonal(op, method="outputs").values)
    assert relative_error(values, op.to_dense().diagonal()) < EXACT
    if make is cs.GGN:
        assert not cs.diagonal(op, method="roots", num_probes=2).values[:3].any()
