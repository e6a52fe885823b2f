"""Modules that call torch.utils.checkpoint: products are those of the same module without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import curvescope as cs
from dense import relative_error
from selection import pairs

D, V = 6, 9
OPERATORS = {
    "hessian": cs.Hessian,
    "ggn": cs.GGN,
    "functional": cs.FunctionalHessian,
    "fisher": cs.EmpiricalFisher,
}
ENGINES = [(engine, again) for engine in ("fast", "autograd", "auto") for again in (False, True)]
How = Callable[..., Tensor]


def plain(function: How, x: Tensor) -> Tensor:
    return function(x)


def nested(function: How, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(function, y, use_reentrant=True)

    return checkpoint(inner, x, use_reentrant=False)


def selective(function: How, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def sequential(function: How, x: Tensor) -> Tensor:
    return checkpoint_sequential([function, nn.Identity()], 2, x, use_reentrant=False)


HOWS: dict[str, How] = {
    "without": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "nested": nested,
    "selective": selective,
    "sequential": sequential,
    "no random state": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
}


class Layer(nn.Module):
    """A layer whose inside is behind a checkpoint, and which reads what the network puts on it."""

    keep: Any = 1.0

    def __init__(self, how: How):
        super().__init__()
        self.how, self.norm, self.up, self.down = how, nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x) * self.keep)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.how(self.inner, x)


class Net(nn.Module):
    """Three such layers, each behind a checkpoint too if `whole`; it `masks`: what it puts on them."""

    def __init__(self, how: How = plain, *, whole: bool = False, masks: bool = False):
        super().__init__()
        self.e, self.u = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(Layer(how) for _ in range(3))
        self.how, self.masks = how if whole else plain, masks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        for layer in self.layers:
            if self.masks:
                layer.keep = (ids % 2 == 0).unsqueeze(-1).to(x.dtype)
            x = self.how(layer, x)
        return self.u(x)


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(V, (2, 3, 5), generator=torch.Generator().manual_seed(seed))
    return ids, targets


def pair(how: How, *, moved: bool = False, kind=torch.float64, **options) -> tuple[cs.Problem, cs.Problem]:
    """The problem of a net with checkpoints, and that of the same net without, in a wide type."""
    torch.manual_seed(0)
    net, bare = Net(how, **options).to(kind), Net(masks=options.get("masks", False)).to(kind)
    bare.load_state_dict(net.state_dict())
    wide = torch.float32 if kind == torch.bfloat16 else kind
    ours, theirs = cs.Problem(net, data()), cs.Problem(bare.to(wide), data())
    if not moved:
        return ours, theirs
    point = torch.randn(theirs.space().size, generator=torch.Generator().manual_seed(2)).to(wide) / 2
    return ours.at(point), theirs.at(point)


def direction(problem: cs.Problem) -> Tensor:
    return torch.randn(problem.space().size, generator=torch.Generator().manual_seed(1)).to(problem.dtype)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_those_without_checkpoints(how: str, moved: bool):
    ours, theirs = pair(HOWS[how], moved=moved)
    assert ours.loss_value() == pytest.approx(theirs.loss_value(), rel=1e-12)
    assert relative_error(ours.gradient(), theirs.gradient()) < 1e-12


@pytest.mark.parametrize(("how", "run"), pairs(list(HOWS), ENGINES))
@pytest.mark.parametrize("moved", [False, True])
def test_products_are_those_without_checkpoints(how: str, run: tuple[str, bool], moved: bool):
    ours, theirs = pair(HOWS[how], moved=moved, whole=True)
    v = direction(theirs)
    for operator in OPERATORS.values():
        A = operator(ours, engine=run[0], checkpoint=run[1])
        want = operator(theirs, engine="autograd") @ v
        for _ in range(2):
            assert relative_error(A @ v, want) < 1e-10
    assert relative_error(cs.Jacobian(ours) @ v, cs.Jacobian(theirs) @ v) < 1e-10


@pytest.mark.parametrize(("engine", "again"), ENGINES)
@pytest.mark.parametrize("params", [None, "*"])
def test_layers_may_be_frozen(engine: str, again: bool, params: str | None):
    problems = []
    for problem in pair(HOWS["without"]):
        problem.model.module.layers[1].requires_grad_(False)
        problems.append(cs.Problem(problem.model.module, data(), params=params))
    ours, theirs = problems
    v = direction(theirs)
    assert relative_error(ours.gradient(), theirs.gradient()) < 1e-12
    found = cs.Hessian(ours, engine=engine, checkpoint=again) @ v
    assert relative_error(found, cs.Hessian(theirs, engine="autograd") @ v) < 1e-10


@pytest.mark.parametrize("how", ["without", "reentrant"])
@pytest.mark.parametrize(("engine", "again"), ENGINES)
def test_weights_may_be_kept_in_half_precision(engine: str, again: bool, how: str):
    ours, theirs = pair(HOWS[how], kind=torch.bfloat16, whole=True)
    v = direction(theirs)
    assert relative_error(ours.gradient(), theirs.gradient()) < 2e-6
    found = cs.Hessian(ours, engine=engine, checkpoint=again) @ v
    assert relative_error(found, cs.Hessian(theirs, engine="autograd") @ v) < 2e-5


@pytest.mark.parametrize("engine", ["fast", "autograd", "auto"])
def test_layers_may_be_given_what_belongs_to_a_batch(engine: str):
    ours, theirs = pair(HOWS["without"], masks=True)
    ours, theirs = (cs.Problem(p.model.module, [data(0), data(5)]) for p in (ours, theirs))
    H, v = cs.Hessian(ours, engine=engine), direction(theirs)
    want = cs.Hessian(theirs, engine="autograd") @ v
    for _ in range(3):
        assert relative_error(H @ v, want) < 1e-10


def test_a_module_in_training_with_gradient_checkpointing_of_transformers():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": V, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off)).double()
    theirs = cs.Problem(module, data())
    v, point = direction(theirs), direction(theirs) / 10
    want, slope = cs.Hessian(theirs.at(point), engine="autograd") @ v, theirs.at(point).gradient()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()
    ours = cs.Problem(module, data()).at(point)
    assert relative_error(ours.gradient(), slope) < 1e-12
    assert relative_error(cs.Hessian(ours) @ v, want) < 1e-10
    assert module.training
    assert module.is_gradient_checkpointing


# ----------------------------------------------------------------------------------- our own checkpoints


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_layers_that_are_computed_again_see_what_belonged_to_their_batch(kind: torch.dtype):
    ours, theirs = pair(plain, masks=True, kind=kind)
    ours, theirs = (cs.Problem(p.model.module, [data(0), data(5)]) for p in (ours, theirs))
    v = direction(theirs)
    for operator in OPERATORS.values():
        A, want = operator(ours, checkpoint=True), operator(theirs, engine="autograd") @ v
        for _ in range(3):
            assert relative_error(A @ v, want) < (1e-10 if kind == torch.float64 else 2e-5)


class Steered(Net):
    """Puts on its layers what depends on its parameters."""

    def forward(self, ids: Tensor) -> Tensor:
        for layer in self.layers:
            layer.keep = self.e(ids)
        return super().forward(ids)


def test_a_layer_that_is_given_a_parameter_by_an_attribute_is_not_computed_again():
    problem = cs.Problem(Steered().double(), data())
    v = direction(problem)
    assert relative_error(cs.Hessian(problem) @ v, cs.Hessian(problem, engine="autograd") @ v) < 1e-10
    with pytest.raises(cs.UsageError, match=r"not an argument .* lose its derivatives \(checkpoint=False\)"):
        cs.Hessian(problem, checkpoint=True) @ v
