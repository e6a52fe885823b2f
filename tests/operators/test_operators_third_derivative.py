"""Third derivatives against forward mode and differences of Hessian products; torch's own silent error."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

import curvescope as cs
import oracles
from curvescope.kernels.norms.plain_norms import plain_norms
from curvescope.operators.taylor.third_derivative import ThirdDerivative, third_derivative
from oracles import relative_error
from selection import one_in, some


def unit(n: int, seed: int = 5) -> Tensor:
    u = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return u / u.norm()


def moved(problem: cs.Problem, u: Tensor) -> cs.Problem:
    """The problem at θ + u."""
    module = copy.deepcopy(problem.model.module)
    step = problem.space().scatter(u)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p += step[name]
    return cs.Problem(module, problem.batches, problem.loss)


def difference(problem: cs.Problem, u: Tensor, *, step: float = 1e-3) -> Tensor:
    """d/dt H(θ + t u) u from our own Hessian products, central differences of fourth order."""

    def product(t: float) -> Tensor:
        return cs.Hessian(moved(problem, t * u)) @ u

    near, far = product(step) - product(-step), product(2 * step) - product(-2 * step)
    return (8 * near - far) / (12 * step)


def torch_triple_backward(problem: cs.Problem, u: Tensor) -> Tensor:
    """∇³L[u,u,·] as one would write it with torch alone."""
    space, total = problem.space(), torch.zeros_like(u)
    direction = space.scatter(u)
    for batch in problem.batches:
        leaves = {
            name: problem.get_parameter(name).detach().requires_grad_() for name in space.parameter_names
        }
        s = problem.loss.sum(problem.outputs(batch, leaves), batch.targets, batch.weights)
        for _ in range(2):
            found = torch.autograd.grad(s, list(leaves.values()), create_graph=True)
            s = sum((g * direction[name]).sum() for name, g in zip(leaves, found, strict=True))
        found = torch.autograd.grad(s, list(leaves.values()), materialize_grads=True)
        total += space.gather(dict(zip(leaves, found, strict=True)))
    return total / problem.num_terms


def vector(problem: cs.Problem, u: Tensor, *blocks: str) -> Tensor:
    return third_derivative(problem, u, *blocks).vector


# ------------------------------------------------------------------------------- the zoo, MLPs, every loss


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=1), indirect=True)
def test_every_case_against_forward_mode_or_differences(bench: oracles.Bench):
    u = unit(bench.problem.space().size)
    found = third_derivative(bench.problem, u)
    if any(isinstance(m, nn.LayerNorm) for m in bench.module.modules()):
        truth, tolerance = difference(bench.problem, u), 1e-8
    else:
        raw, dense = torch.zeros_like(u), bench.dense
        raw[bench.order] = u

        def along(f):
            return lambda theta: jvp(f, (theta,), (raw,))[1]

        truth, tolerance = along(along(grad(dense.value)))(dense.theta)[bench.order], 1e-10
    scale = float(truth.abs().max())
    assert scale > 1e-12 or bench.case.name == "mlp-relu-mse"
    assert float((found.vector - truth).abs().max()) <= tolerance * scale
    assert found.value == pytest.approx(float(truth @ u), rel=1e-7, abs=tolerance * scale)
    assert len(found.vector) == len(truth)


def test_it_is_the_third_coefficient_of_the_loss(tiny: oracles.Bench):
    problem = tiny.problem
    u = unit(problem.space().size)
    found, h = third_derivative(problem, u).value, 0.005
    L = {t: moved(problem, t * h * u).loss_value() for t in (-3, -2, -1, 1, 2, 3)}
    stencil = (-L[3] + 8 * L[2] - 13 * L[1] + 13 * L[-1] - 8 * L[-2] + L[-3]) / (8 * h**3)
    assert found == pytest.approx(stencil, rel=1e-4)


def test_it_is_symmetric_in_its_three_directions(tiny: oracles.Bench):
    """T[(u+v)³] − T[(u−v)³] = 6 T[u,u,v] + 2 T[v,v,v]."""
    problem = tiny.problem
    u, v = (unit(problem.space().size, seed) for seed in (1, 2))

    def cube(w: Tensor) -> float:
        return third_derivative(problem, w).value

    mixed = float(vector(problem, u) @ v)
    assert cube(u + v) - cube(u - v) == pytest.approx(6 * mixed + 2 * cube(v), rel=1e-10)


@pytest.mark.parametrize("cuts", some([[2, 1, 2], [5], [1, 4], [1, 1, 1, 1, 1]], 1))
@pytest.mark.parametrize(
    "name", ["merged-alibi-scaled-residual", "plain-attention-tied", "real-to-real-identity"]
)
def test_batching_does_not_matter(name: str, cuts: list[int]):
    case = oracles.CASE[name]
    bench = oracles.bench(name)
    data = oracles.cut(oracles.make_data(case), cuts)
    problem = cs.Problem(bench.model, oracles.as_batches(data), oracles.as_package_loss(case.kind))
    u = unit(problem.space().size)
    assert relative_error(vector(problem, u), vector(bench.problem, u)) < 1e-12


@pytest.mark.parametrize("blocks", [("L0.W_Q",), ("L0.W_[KV]", "U"), ("L0.h1.W_Q", "L0.h0.W_O")])
def test_blocks_are_parts_of_the_whole(tiny: oracles.Bench, blocks: tuple[str, ...]):
    problem = tiny.problem
    space, part = problem.space(), problem.space(*blocks)
    u = unit(part.size)
    whole = vector(problem, space.gather(part.scatter(u)))
    expected = part.gather(space.scatter(whole))
    assert relative_error(vector(problem, u, *blocks), expected) < 1e-12


def test_softmax_regression_has_the_third_cumulants_of_its_logits():
    """L = mean of logsumexp(xW) − (xW)_y, hence ∇³L[u,u,u] is the mean of κ₃ of xU under softmax(xW)."""
    from curvescope.closed_form.softmax import cumulants

    source = torch.Generator().manual_seed(3)
    x, y = torch.randn(7, 4, generator=source).double(), torch.randint(0, 3, (7,), generator=source)
    problem = cs.Problem(oracles.shaken(nn.Linear(4, 3, bias=False)), (x, y))
    u = unit(12)
    W = problem.model.module.weight.detach()
    moved_logits = x @ problem.space().scatter(u)["weight"].T
    expected = cumulants((x @ W.T).softmax(-1), moved_logits).third.mean()
    assert third_derivative(problem, u).value == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("loss", ["mse", cs.CustomLoss(lambda z, y, w: (z * y).sum(), lambda y, w: len(y))])
def test_a_problem_of_at_most_second_degree_has_none(loss: str | cs.CustomLoss):
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.ones(6, 2).double()
    found = third_derivative(cs.Problem(nn.Linear(3, 2).double(), (x, y), loss), unit(8))
    assert found.value == 0
    assert not found.vector.any()


# --------------------------------------------------------------------------------------------------- norms


class ByHand(nn.Module):
    """LayerNorm, entry by entry."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        d = x.shape[-1]
        mean = sum(x[..., i] for i in range(d)) / d
        var = sum((x[..., i] - mean) ** 2 for i in range(d)) / d
        y = [(x[..., i] - mean) / (var + self.eps) ** 0.5 * self.weight[i] + self.bias[i] for i in range(d)]
        return torch.stack(y, dim=-1)


class Net(nn.Module):
    """Linear, a norm, GELU, linear, on inputs (B, 4, 3) or, with channels first, the same turned."""

    def __init__(self, norm: nn.Module, *, channels_first: bool = False):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 6), norm, nn.Linear(6, 5)
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2) if self.channels_first else self.norm(h)
        return self.down(nn.functional.gelu(h))


def normed(norm: nn.Module, loss: str, **options: bool) -> cs.Problem:
    source = torch.Generator().manual_seed(2)
    x = torch.randn(4, 4, 3, generator=source).double()
    y = torch.randint(0, 5, (4, 4), generator=source)
    if loss == "mse":
        y = torch.randn(4, 4, 5, generator=source).double()
    module = oracles.drawn(lambda: Net(norm, **options))
    return cs.Problem(oracles.shaken(module), (x, y), loss)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_layer_norm_is_right_and_torch_alone_is_not(loss: str):
    problem = normed(nn.LayerNorm(6), loss)
    by_hand = copy.deepcopy(problem.model.module)
    by_hand.norm = ByHand(by_hand.norm)
    u = unit(problem.space().size)
    found = vector(problem, u)
    assert relative_error(found, difference(problem, u)) < 1e-8
    plain = cs.Problem(by_hand, problem.batches, loss)
    assert relative_error(found, vector(plain, u)) < 1e-12
    assert relative_error(found, torch_triple_backward(plain, u)) < 1e-12
    suspect = torch_triple_backward(problem, u)
    if relative_error(suspect, found) < 1e-8:
        pytest.skip(f"torch {torch.__version__} differentiates F.layer_norm three times correctly")
    assert relative_error(suspect, found) > 0.02


NORMS = {
    "layer": (lambda: nn.LayerNorm(6), False),
    "layer over two axes, no bias": (lambda: nn.LayerNorm((4, 6), bias=False), False),
    "layer, not affine": (lambda: nn.LayerNorm(6, elementwise_affine=False, eps=0.1), False),
    "rms": (lambda: nn.RMSNorm(6), False),
    "rms, eps": (lambda: nn.RMSNorm(6, eps=0.2), False),
    "group": (lambda: nn.GroupNorm(2, 6), True),
    "group, not affine": (lambda: nn.GroupNorm(3, 6, affine=False), True),
    "batch, running statistics": (lambda: nn.BatchNorm1d(6), True),
    "batch, own statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), True),
    "instance": (lambda: nn.InstanceNorm1d(6, affine=True), True),
    "instance, running statistics": (lambda: nn.InstanceNorm1d(6, track_running_stats=True), True),
}


LIKE_ANOTHER = ["layer, not affine", "rms, eps", "group, not affine", "instance, running statistics", "layer"]
DIFFERENT = [name for name in NORMS if name not in LIKE_ANOTHER]


@pytest.mark.parametrize("name", DIFFERENT + some(LIKE_ANOTHER, 0))
@pytest.mark.filterwarnings("ignore:batch norm")
def test_every_norm_of_torch_is_written_out(name: str):
    make, channels_first = NORMS[name]
    norm = make()
    for statistic in ("running_mean", "running_var"):
        if getattr(norm, statistic, None) is not None:
            getattr(norm, statistic).add_(0.3)
    problem = normed(norm, "cross_entropy", channels_first=channels_first)
    u = unit(problem.space().size)
    assert relative_error(vector(problem, u), difference(problem, u)) < 1e-7
    batch = problem.batches[0]
    with torch.no_grad():
        expected = problem.outputs(batch)
        with plain_norms():
            assert relative_error(problem.outputs(batch), expected) < 1e-13


def test_the_functions_below_the_modules_are_written_out():
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    w, b, mean, var = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).double()
    calls = [
        lambda: torch.layer_norm(x, (4,), None, None, 0.1),
        lambda: torch.rms_norm(x, (4,)),
        lambda: torch.group_norm(x, 3, w, b, 0.1),
        lambda: torch.batch_norm(x, w, b, mean, var, False, 0.1, 0.2, True),
        lambda: torch.batch_norm(x, w, b, None, None, True, 0.1, 0.2, True),
        lambda: nn.functional.batch_norm(x, mean.clone(), var.clone(), training=True),
        lambda: nn.functional.instance_norm(x, mean.clone(), var.clone()),
        lambda: torch.instance_norm(x, w, b, None, None, True, 0.1, 0.2, True),
        lambda: nn.functional.instance_norm(x, mean, var, w, b, False),
    ]
    for call in calls:
        with plain_norms():
            found = call()
        assert relative_error(found, call()) < 1e-13


class Checkpointed(nn.Module):
    """A layer norm behind a checkpoint of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net(nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_norm_behind_a_checkpoint_of_torch_is_written_out():
    plain = normed(nn.LayerNorm(6), "cross_entropy")
    module, u = Checkpointed(), unit(plain.space().size)
    module.inner = plain.model.module
    assert relative_error(vector(cs.Problem(module, plain.batches), u), vector(plain, u)) < 1e-13


@pytest.mark.filterwarnings("ignore:batch norm")
def test_nothing_is_changed():
    module = normed(nn.BatchNorm1d(6), "cross_entropy", channels_first=True).model.module
    module.train()
    module.up.weight.requires_grad_(False)
    module.down.bias.grad = torch.ones(5).double()
    before = {name: (t.clone(), t._version) for name, t in module.state_dict(keep_vars=True).items()}
    problem = cs.Problem(module, normed(nn.LayerNorm(6), "cross_entropy").batches)
    u = unit(problem.space().size)
    expected = vector(problem, u)
    with torch.no_grad():
        assert torch.equal(vector(problem, u), expected)
    with torch.inference_mode():
        assert torch.equal(vector(problem, u), expected)
    assert all(m.training for m in module.modules())
    assert not module.up.weight.requires_grad
    assert torch.equal(module.down.bias.grad, torch.ones(5).double())
    assert module.up.bias.grad is None
    for name, t in module.state_dict(keep_vars=True).items():
        assert torch.equal(t, before[name][0])
        assert t._version == before[name][1]
    x = torch.randn(2, 6).double().requires_grad_()
    assert "LayerNorm" in type(nn.functional.layer_norm(x, (6,)).grad_fn).__name__  # torch's own again


# -------------------------------------------------------------------------------------------------- refusals


def test_wrong_directions_are_refused(tiny: oracles.Bench):
    n = tiny.problem.space().size
    for u in (torch.ones(n + 1).double(), torch.ones(n, 1).double(), np.ones(n)):
        with pytest.raises(cs.UsageError, match=f"expected a direction u of {n} entries"):
            third_derivative(tiny.problem, u)
    with pytest.raises(cs.UsageError, match="float32"):
        third_derivative(tiny.problem, torch.ones(n))
    with pytest.raises(cs.UsageError, match="no block matches"):
        third_derivative(tiny.problem, torch.ones(n).double(), "L7.W_Q")
    with pytest.raises(cs.UsageError, match=r"expected a cs\.Problem"):
        third_derivative(tiny.model, torch.ones(n).double())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class FromOps(nn.LayerNorm):
    def forward(self, input):
        return torch.ops.aten.layer_norm(input, [6], self.weight, self.bias, self.eps)


def test_a_norm_that_cannot_be_reached_is_refused():
    problem = normed(FromOps(6), "cross_entropy")
    with pytest.raises(cs.CurvescopeError, match="third derivative is wrong"):
        third_derivative(problem, unit(problem.space().size))


def test_fused_attention_is_refused_with_what_to_do():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    problem = cs.Problem(oracles.FusedAttention().double(), (x, x), "mse")
    try:
        found = third_derivative(problem, unit(60))
    except cs.CurvescopeError as error:
        assert "cannot be differentiated three times" in str(error)  # noqa: PT017
        assert "plain attention" in str(error)  # noqa: PT017
    else:
        assert relative_error(found.vector, difference(problem, unit(60))) < 1e-6
        pytest.skip("this torch differentiates fused attention three times")


@pytest.mark.parametrize("loss", ["mse", "linear"])
def test_an_operation_that_is_differentiable_once_is_refused(loss: str):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    if loss == "linear":
        loss = cs.CustomLoss(lambda z, y, w: (z * y).sum(), lambda y, w: len(y))
    problem = cs.Problem(oracles.shaken(oracles.SquaredOnce()), (x, x[:, :2]), loss)
    with pytest.raises(cs.CurvescopeError, match="cannot be differentiated three times"):
        third_derivative(problem, unit(8))


def test_the_result_is_saved_and_read(tiny: oracles.Bench, tmp_path):
    found = third_derivative(tiny.problem, unit(tiny.problem.space().size))
    back = ThirdDerivative.load(found.save(tmp_path))
    assert back.value == found.value
    assert torch.equal(back.vector, found.vector)


class Attends(nn.Module):
    """PyTorch's own layer of attention, which calls a fused kernel."""

    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        h = self.embed(x)
        return self.out(h + self.attend(h, h, h, need_weights=False)[0])


def test_fused_attention_gives_way_to_one_with_third_derivatives():
    module, source = Attends().double(), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (2, 3, 4), generator=source)
    problem = cs.Problem(module, (tokens[0], tokens[1]))
    u = unit(problem.space().size)
    assert relative_error(third_derivative(problem, u).vector, difference(problem, u)) < 1e-7
