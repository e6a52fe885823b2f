"""Exact diagonals against dense truth, and those from random roots within their errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
import oracles
from curvescope.core.errors import UsageError
from curvescope.core.progress import listening
from curvescope.operators import ExactDiagonal, diagonals
from curvescope.operators.roots import fisher_columns, ggn_columns
from oracles import as_batches, bench, cut, drawn, make_data, relative_error
from selection import pairs, some

EXACT = 1e-12
OFTEN = [  # tied weights, attention and norms, embeddings; each loss
    "plain-attention-tied",
    "post-layernorm-relu-ignored",
    "real-to-real-identity",
    "plain-normed-mlp",
    "custom-loss-pre-layernorm",
    "patches-to-class",
]
REST = [name for name in oracles.NAMES if name not in OFTEN]


def diagonal_of(op: cs.LinearOperator, **options) -> torch.Tensor:
    return torch.as_tensor(cs.exact_diagonal(op, **options).values)


@pytest.mark.parametrize("name", some([*OFTEN, *REST], few=len(OFTEN)))
def test_ggn_and_empirical_fisher_have_the_dense_diagonals(name):
    found = bench(name)
    assert relative_error(diagonal_of(cs.GGN(found.problem)), found.truth("ggn").diagonal()) < EXACT
    fisher = cs.EmpiricalFisher(found.problem)
    assert relative_error(diagonal_of(fisher, method="outputs"), found.truth("fisher").diagonal()) < EXACT


@pytest.mark.parametrize("kind", ["cross_entropy", "mse", "mse_mean"])
def test_the_fisher_of_drawn_targets_has_the_diagonal_of_its_matrix(kind):
    name = {"cross_entropy": "plain-attention-tied", "mse": "mlp-relu-mse", "mse_mean": "plain-normed-mlp"}[
        kind
    ]
    op = cs.MonteCarloFisher(bench(name).problem, num_samples=3, seed=2)
    assert relative_error(diagonal_of(op, method="outputs"), op.to_dense().diagonal()) < EXACT


@pytest.mark.parametrize("name", ["hessian", "functional"])
def test_any_operator_has_a_diagonal_from_its_entries(name):
    op = bench("post-layernorm-relu-ignored").operator(name).block("L0.W_[QK]")
    found = cs.exact_diagonal(op)
    assert found.cost.method == "entries"
    assert relative_error(torch.as_tensor(found.values), op.to_dense().diagonal()) < EXACT


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("cuts", [[5], [1, 4]])
def test_batches_and_chunks_do_not_matter(cuts, chunk):
    found = bench("plain-attention-tied")
    problem = cs.Problem(found.model, as_batches(cut(make_data(found.case), cuts)), found.problem.loss)
    op = cs.GGN(problem, chunk=chunk)
    assert relative_error(diagonal_of(op, method="outputs"), found.truth("ggn").diagonal()) < EXACT


def test_the_cheaper_way_is_taken_and_said_before(tmp_path):
    found = bench("pre-layernorm-gelu-2layers")
    op = cs.GGN(found.problem)
    assert cs.diagonal_cost(op).passes == 5 * 4 * 5  # sequences, positions, classes
    assert cs.diagonal_cost(op).method == "outputs"
    norm = op.block("L0.ln1.g")
    assert cs.diagonal_cost(norm).passes == 2 * 4
    assert str(cs.diagonal_cost(norm)) == "8 reverse passes, by entries"
    both = [diagonal_of(norm, method=way) for way in ("outputs", "entries")]
    assert relative_error(*both) < EXACT
    with pytest.raises(UsageError, match="takes 100 reverse passes, by outputs, more than max_passes = 99"):
        cs.exact_diagonal(op, max_passes=99)
    result = cs.exact_diagonal(op)
    again = ExactDiagonal.load(result.save(tmp_path))
    np.testing.assert_array_equal(again.block("L0.ln1.g"), result.block("L0.ln1.g"))
    assert relative_error(result.block("L0.ln1.g"), both[0]) < EXACT
    frame = result.to_frame()
    assert frame["trace"].sum() == pytest.approx(float(found.truth("ggn").trace()))
    assert list(frame["block"]) == [block.name for block in op.space]
    with pytest.raises(UsageError, match="no block is called"):
        result.block("L9")


@pytest.mark.parametrize("rows", [1, 3])
def test_layers_alone_give_the_diagonal_that_samples_give(rows):
    """With biases, and a layer that is used twice; damping is added."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.again(self.again(self.first(x).tanh()).tanh()).tanh()
            return self.last(h)

    x = torch.randn(4, rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(4 * rows).reshape(4, rows) % 2
    problem = cs.Problem(drawn(Twice).double(), [(x[:1], y[:1]), (x[1:], y[1:])])
    G = cs.GGN(problem, damping=0.1)
    assert relative_error(diagonal_of(G, method="outputs"), G.to_dense().diagonal()) < EXACT
    layers, samples = diagonals._by_layers(G), diagonals._by_samples(G)
    assert layers is not None
    np.testing.assert_allclose(layers, samples, rtol=1e-10)
    assert diagonals._by_layers(cs.GGN(bench("pre-layernorm-gelu-2layers").problem)) is None


def test_how_far_it_has_come_is_said():
    case, heard = bench("pre-layernorm-gelu-2layers"), []
    data = as_batches(cut(make_data(case.case), [5]))
    G = cs.GGN(cs.Problem(case.model, data, case.problem.loss), chunk=1)
    with listening(lambda *step: heard.append(step)):
        cs.exact_diagonal(G, method="outputs")
    assert len([step for step in heard if step[0] == "exact diagonal"]) > 2
    with listening(lambda *step: heard.append(step)):
        cs.kfac_quality(case.problem, "L0.b_[12O]", kind="empirical")
    assert {"approximations", "dense layers"} <= {what for what, *_ in heard}
    with listening(lambda *step: heard.append(step)):
        cs.KFAC(G.problem, "L0.b_[12O]", kind="ggn").trace()
    assert "factors" in {what for what, *_ in heard}


def test_ignored_targets_cost_nothing():
    case = bench("post-layernorm-relu-ignored")
    assert cs.diagonal_cost(cs.GGN(case.problem), "outputs").passes == (5 * 4 - 4) * 5


@pytest.mark.parametrize("name", ["plain-attention-tied", "mlp-relu-mse", "custom-loss-pre-layernorm"])
def test_columns_are_roots_of_the_matrices_in_the_outputs(name):
    """Σ_k r_k r_kᵀ, or units with M beside them, against products of the loss."""
    problem = bench(name).problem
    batch = problem.batches[0]
    z = problem.outputs(batch).detach()
    u = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype)
    loss, how = problem.loss, (z, batch.targets, batch.weights, u)
    for make, product in ((ggn_columns, loss.hessian_product), (fisher_columns, loss.term_outer_product)):
        columns = make(loss, z, batch)
        R = columns.make(slice(0, columns.number))
        other = R if columns.times is None else columns.times(R)
        inner = (R * u).flatten(2).sum(-1)  # (k, B)
        found = torch.einsum("kb,kb...->b...", inner, other)
        assert relative_error(found, product(*how)) < EXACT


@pytest.mark.parametrize(
    ("name", "probe"), pairs(["plain-attention-tied", "mlp-relu-mse"], ["rademacher", "gaussian"])
)
def test_random_roots_meet_their_errors(name, probe):
    found = bench(name)
    op, right = cs.GGN(found.problem), found.truth("ggn").diagonal().numpy()
    runs = [cs.diagonal(op, method="roots", num_probes=24, probe=probe, seed=seed) for seed in range(6)]
    seen = right > 1e-9 * right.max()
    values = np.array([run.values.numpy() for run in runs])
    spread = np.sqrt(np.mean((values - right)[:, seen] ** 2, axis=0)) / right[seen]
    assert np.median(spread) < np.sqrt(2 / 24)
    held = [(low.numpy() <= right) & (right <= high.numpy()) for low, high in (run.interval for run in runs)]
    assert np.mean([part[seen] for part in held]) > 0.88
    assert abs(np.mean((values.mean(axis=0) / right)[seen]) - 1) < 0.1
    assert runs[0].num_products == 0
    assert runs[0].num_samples == 24


TORCH = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.2), nn.MSELoss()]


@pytest.mark.parametrize("loss", TORCH, ids=["classes", "smoothed", "mse"])
def test_losses_of_torch_have_exact_diagonals_and_random_roots(loss):
    """With one pass for each output, as ours have."""
    module = drawn(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))).double()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.cos() if isinstance(loss, nn.MSELoss) else torch.tensor([0, 1, 2, 2, 1, 0])
    G = cs.GGN(cs.Problem(module, (x, y), loss))
    exact = cs.exact_diagonal(G, method="outputs")
    assert exact.cost.passes == 6 * 3
    assert relative_error(torch.as_tensor(exact.values), G.to_dense().diagonal()) < EXACT
    found = cs.diagonal(G, method="roots", num_probes=400)
    assert np.abs(found.values - exact.values).max() < 4 * np.sqrt(2 / 400) * exact.values.max()


def test_random_roots_do_not_depend_on_batches_or_on_other_draws():
    found = bench("plain-attention-tied")
    whole = cs.Problem(found.model, as_batches(cut(make_data(found.case), [5])), found.problem.loss)
    one, other = (list(cs.GGN(p).random_squares(4, probe="rademacher", seed=1, at_once=k))
                  for p, k in ((whole, 4), (found.problem, 3)))  # fmt: skip
    assert relative_error(torch.cat(other, dim=1), torch.cat(one, dim=1)) < EXACT


def test_a_class_of_small_probability_is_no_harder():
    """The relative variance of every entry of the last bias is at most 2, also where p is 1e-6."""
    loss, z = cs.CrossEntropy(), torch.tensor([[[0.0, 0.0, -14.0]]], dtype=torch.float64)
    batch = cs.Batch(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
    noise = cs.core.seeds.probes(3, 4000, seed=0).T.reshape(-1, 1, 1, 3)
    squares = loss.root(z, batch.targets, batch.weights, noise).reshape(-1, 3) ** 2
    p = z.softmax(-1).flatten()
    assert relative_error(squares.mean(0) / (p - p**2), torch.ones(3, dtype=torch.float64)) < 0.1
    assert float((squares.var(0) / (p - p**2) ** 2).max()) < 2.1


def test_what_is_refused():
    found, custom = bench("plain-attention-tied"), bench("custom-loss-pre-layernorm")
    H = cs.Hessian(found.problem)
    with pytest.raises(UsageError, match="Hessian does not have the form"):
        cs.exact_diagonal(H, method="outputs")
    with pytest.raises(UsageError, match="columns"):
        cs.exact_diagonal(H, method="columns")
    with pytest.raises(UsageError, match="same rows and columns"):
        cs.exact_diagonal(H.block("emb.weight", "qkv.weight"))
    with pytest.raises(UsageError, match="random_squares"):
        cs.diagonal(H, method="roots")
    with pytest.raises(UsageError, match="square root of the Hessian of the loss 'custom'"):
        cs.diagonal(cs.GGN(custom.problem), method="roots", num_probes=2)


def test_sequences_that_see_each_other_are_refused():
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x - x.mean(dim=0))

    module = oracles.shaken(oracles.drawn(Coupled))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = cs.Problem(module, cs.Batches([cs.Batch(x, torch.tensor([0, 1, 0, 1]))]))
    with pytest.raises(UsageError, match="depend on the other sequences"):
        cs.exact_diagonal(cs.GGN(problem), method="outputs")
    op = cs.GGN(problem)
    assert relative_error(diagonal_of(op, method="entries"), op.to_dense().diagonal()) < EXACT


@pytest.mark.parametrize("make", [cs.GGN, cs.EmpiricalFisher, cs.MonteCarloFisher])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), "cross_entropy"], ids=str)
@pytest.mark.parametrize("more", [{}, {"damping": 0.1, "weight_decay": {"matrices": 0.3}}], ids=str)
def test_losses_of_torch_and_what_is_added_are_in_the_diagonal(make, loss, more):
    m = drawn(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))).double()
    x = torch.linspace(-2, 2, 15, dtype=torch.float64).reshape(5, 3)
    A = make(cs.Problem(m, (x, torch.tensor([0, 2, 1, 1, 0])), loss), **more)
    truth = torch.as_tensor(A.to_dense()).diagonal()
    found = torch.as_tensor(cs.exact_diagonal(A, method="outputs").values)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-14)
    if make is cs.GGN and loss == "cross_entropy" and more:
        estimate = cs.diagonal(A, method="roots", num_probes=400)
        assert float((torch.as_tensor(estimate.values) - truth).abs().max()) < 0.05


class Routed(nn.Module):
    """Two experts; the sign of a feature chooses which of them a token goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.reshape(-1, 3), torch.zeros_like(x).reshape(-1, 3)
        for number, expert in enumerate(self.experts):
            (at,) = ((flat[:, 0] > 0) == bool(number)).nonzero(as_tuple=True)
            out = out.index_add(0, at, torch.tanh(expert(flat[at])))
        return self.head(out.reshape(x.shape))


@pytest.mark.parametrize("make", [cs.GGN, cs.EmpiricalFisher])
def test_experts_that_no_token_of_a_batch_goes_to(make):
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 2, 3, generator=source).double(), torch.randint(0, 4, (4, 2), generator=source)
    x[2:, :, 0] = x[2:, :, 0].abs()  # the second batch is all of one expert
    torch.manual_seed(0)
    problem = cs.Problem(Routed().double(), [(x[:2], y[:2]), (x[2:], y[2:])])
    op = make(problem)
    found = cs.exact_diagonal(op, method="outputs").values
    assert relative_error(found, op.to_dense().diagonal()) < 1e-12
    one = cs.KFAC(problem)
    other = cs.KFAC(cs.Problem(problem.model, (x, y)))
    assert relative_error(one.to_dense(), other.to_dense()) < 1e-12
