"""Modules that cannot be differentiated twice are refused in one sentence, where they are loaded or run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import curvescope as cs
from curvescope.models.plain import mode_notes
from curvescope.models.running.torch_checkpoints import RefuseReentrant


def inference_module() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def fake_module() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(2, 2)


def holding(p: Tensor) -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(p, requires_grad=p.is_floating_point() or p.is_complex())
    return module


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


REFUSED = {
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device.*to_empty"),
    "meta in part": (on_two_devices, "'1.weight' is on the meta device"),
    "fake": (fake_module, "'weight' is a fake tensor"),
    "complex": (lambda: holding(torch.ones(2, dtype=torch.complex64)), "'w' is torch.complex64"),
    "int8": (lambda: holding(torch.ones(2, dtype=torch.int8)), "'w' is torch.int8"),
    "quantized": (
        lambda: holding(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        "'w' is torch.qint8",
    ),
    "sparse": (lambda: holding(torch.eye(2).to_sparse()), "'w' is sparse_coo.*to_dense"),
    "no parameters": (nn.ReLU, "expected a module with parameters, but ReLU has none"),
    "sparse embedding": (
        lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)),
        "'0' is an Embedding with sparse=True.*sparse = False",
    ),
    "sparse bag": (
        lambda: nn.EmbeddingBag(3, 2, sparse=True),
        "the module is an EmbeddingBag with sparse=True",
    ),
    "scaled gradients": (
        lambda: nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True), nn.Linear(2, 2)),
        "'0' scales them",
    ),
    "norm in the forward pass": (
        lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.Linear(2, 2)),
        r"'0' rescales rows of its weight \(max_norm=1\)",
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
        "weight_norm, whose second derivative in PyTorch is not",
    ),
    "weight norm by hook": (
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        "the module has weight_norm",
    ),
    "inference mode": (inference_module, "'weight' was made in inference mode"),
    "traced": (
        lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
        "the module is compiled by torch.jit",
    ),
    "traced inside": (
        lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))),
        "'1' is compiled by torch.jit",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_modules_without_second_derivatives_are_refused(make, message: str):
    with pytest.raises(cs.UsageError, match=message):
        cs.load(make())


def test_a_model_of_which_every_parameter_is_frozen_is_refused():
    module = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(cs.UsageError, match="every parameter of Linear is frozen"):
        cs.Problem(module, (torch.ones(1, 2), torch.zeros(1, dtype=torch.long)))


class Checkpointed(nn.Module):
    """A layer behind torch's checkpoint, held by the function and not passed to it."""

    def __init__(self, *, reentrant: bool):
        super().__init__()
        self.reentrant, self.layer = reentrant, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda t: nn.functional.linear(t, self.layer.weight).tanh(), x, use_reentrant=self.reentrant
        )


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("needs", [False, True])
def test_a_reentrant_checkpoint_is_refused(needs: bool):
    x = torch.ones(3, 2, requires_grad=needs)
    with pytest.raises(cs.UsageError, match="use_reentrant=False"), RefuseReentrant():
        Checkpointed(reentrant=True)(x)
    assert torch.is_grad_enabled()


def test_other_checkpoints_and_passes_without_a_graph_are_not():
    x = torch.ones(3, 2)
    module = Checkpointed(reentrant=False)
    with RefuseReentrant():
        found = module(x)
        with torch.no_grad():
            nn.Linear(2, 2)(x)
    assert torch.equal(found, module(x))
    assert found.requires_grad


def test_weight_norm_of_the_whole_matrix_is_right():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4), dim=None), nn.Tanh()).double()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    H = cs.Hessian(cs.Problem(net, (x, torch.ones(4, 4, dtype=torch.float64)), loss="mse")).to_dense()
    torch.testing.assert_close(H, H.T, rtol=0, atol=1e-12)


class Distances(nn.Module):
    """How far rows are from centers: an operation of torch's without a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.eye(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.centers)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(3, 2), nn.Hardsigmoid()), Distances])
def test_advice_fits_the_operation_that_has_no_second_derivative(make):
    H = cs.Hessian(cs.Problem(make(), (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))))
    with pytest.raises(
        cs.CurvescopeError, match=r"without a second derivative: .*write that operation"
    ) as said:
        H @ torch.ones(H.shape[1])
    assert "attention" not in str(said.value)


def test_what_is_said_of_batch_norm_is_true():
    tracked, untracked = nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)
    assert [note.split(":")[0] for note in mode_notes(tracked)] == ["batch norm uses its running statistics"]
    assert not mode_notes(tracked.eval())
    for mode in (True, False):
        (note,) = mode_notes(untracked.train(mode))
        assert "uses those of each batch" in note


def test_uninitialized_lazy_layer_is_named() -> None:
    lazy = nn.Sequential(nn.Embedding(5, 4), nn.LazyLinear(5))
    with pytest.raises(cs.UsageError, match=r"1\.weight"):
        cs.load(lazy)
    lazy(torch.zeros(1, 2, dtype=torch.long))
    assert cs.load(lazy).num_parameters == 45


class Odd(nn.Module):
    """Parameters without axes and without entries beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0))
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) * self.temperature))


def test_parameters_without_axes_or_entries():
    torch.manual_seed(0)
    module = Odd().double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    problem = cs.Problem(module, (x, y))
    assert problem.space().size == torch.nn.utils.parameters_to_vector(module.parameters()).numel()
    assert next(block.name for block in problem.space()) == "temperature"
    G = cs.GGN(problem)
    assert list(cs.exact_diagonal(G).to_frame()["entries"]) == [1, 12, 4, 12, 3]
    K = cs.KFAC(problem)
    assert "temperature" in K.left_out
    assert K.shape[0] == 12 + 4 + 12 + 3
    numbers = cs.CurvatureMonitor(module, (x, y), budget=1.0, raise_errors=True).step(0)
    assert numbers is not None
    assert numbers["trace_low"] < numbers["trace_high"]
    assert len(cs.block_density(cs.Hessian(problem))) == 5
