"""What engines keep between products is right, bounded, and gone with its owner."""

import copy
import gc
import weakref

import pytest
import torch

import curvescope as cs
from curvescope.engines import graph_cache as kept
from curvescope.engines.memory import result_bytes
from selection import pairs, some

MAKERS = {"hessian": cs.Hessian, "ggn": cs.GGN, "functional": cs.FunctionalHessian}


def problem() -> cs.Problem:
    model = cs.load(
        cs.TransformerConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=6, vocab_size=7), dtype="float64"
    )
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (4, 6), generator=source)
    return cs.Problem(model, cs.Batches.from_tensors(tokens, tokens.roll(1, 1), batch_size=2))


def direction(operator: cs.LinearOperator) -> torch.Tensor:
    return torch.randn(operator.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("engine", some(["fast", "autograd"], 1))
@pytest.mark.parametrize(
    ("write", "name"), pairs(["no_grad", "data", "signs", "places", "load_state_dict"], [*MAKERS])
)
def test_new_parameters_are_noticed(engine, name, write):
    p = problem()
    operator = MAKERS[name](p, engine=engine)
    v = direction(operator)
    before = operator @ v
    W = p.model.get_parameter("L0.W_1")
    if write == "no_grad":
        with torch.no_grad():
            W.mul_(1.5)
    elif write == "data":
        W.data.mul_(1.5)
    elif write == "signs":
        W.data.neg_()
    elif write == "places":
        W.data.copy_(W.data.flip(1))
    else:
        state = {k: t * 1.5 for k, t in p.model.module.state_dict().items()}
        p.model.module.load_state_dict(state)
    after = operator @ v
    fresh = MAKERS[name](p, engine="autograd") @ v
    assert (after - before).norm() > 1e-6 * before.norm()
    torch.testing.assert_close(after, fresh, rtol=1e-10, atol=1e-14)


def test_new_data_are_noticed():
    p = problem()
    H = cs.Hessian(p)
    v = direction(H)
    before = H @ v
    p.batches[0].targets.fill_(3)
    torch.testing.assert_close(H @ v, cs.Hessian(p, engine="autograd") @ v, rtol=1e-10, atol=1e-14)
    assert not torch.allclose(H @ v, before)


def test_data_written_past_autograd_are_noticed():
    p = problem()
    tokens = p.batches[0].inputs.numpy()
    H = cs.Hessian(p)
    v = direction(H)
    before = H @ v
    tokens[0, :2] = tokens[0, 1::-1].copy() + 1 & 3
    torch.testing.assert_close(H @ v, cs.Hessian(p, engine="autograd") @ v, rtol=1e-10, atol=1e-14)
    assert not torch.allclose(H @ v, before)


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.phi, self.u = torch.nn.Embedding(7, 4), torch.nn.GELU(), torch.nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.u(self.phi(self.e(ids)))


@pytest.mark.parametrize("change", ["inputs", "submodule", "hook"])
def test_other_inputs_submodules_and_hooks_are_noticed(change):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Reader().double()
    inputs = {"ids": torch.arange(6)[None]}
    p = cs.Problem(module, cs.Batches([cs.Batch(inputs, torch.arange(6)[None])]))
    H = cs.Hessian(p)
    v = direction(H)
    before = H @ v
    if change == "inputs":
        p.batches[0].inputs["ids"] = torch.arange(6).flip(0)[None]
    elif change == "submodule":
        module.phi = torch.nn.SiLU()
    else:
        module.phi.register_forward_hook(lambda part, given, found: 2 * found)
    torch.testing.assert_close(H @ v, cs.Hessian(p, engine="autograd") @ v, rtol=1e-10, atol=1e-14)
    assert not torch.allclose(H @ v, before)


def test_a_copy_keeps_its_own():
    H = cs.Hessian(problem())
    v = direction(H)
    before = H @ v
    other = copy.deepcopy(H)
    with torch.no_grad():
        other.problem.model.get_parameter("L0.W_1").mul_(3)
    assert not torch.allclose(other @ v, before)
    assert torch.equal(H @ v, before)


@pytest.mark.parametrize("name", MAKERS)
def test_a_kept_graph_gives_the_same_as_a_new_one(name):
    p = problem()
    operator = MAKERS[name](p)
    v = direction(operator)
    first, second = operator @ v, operator @ v
    assert torch.equal(first, second)


def test_nothing_is_kept_beyond_the_budget(monkeypatch):
    kept.clear_all_caches()
    monkeypatch.setattr(kept, "SHARE", 0.0)
    H = cs.Hessian(problem())
    v = direction(H)
    without = H @ v
    assert not kept.clear_all_caches()
    monkeypatch.undo()
    assert torch.equal(H @ v, without)
    assert kept.clear_all_caches()


def test_what_was_used_longest_ago_goes_first(monkeypatch):
    kept.clear_all_caches()
    alive = weakref.WeakSet[Graph]()
    monkeypatch.setattr(kept, "free_bytes", lambda device: 100 - 20 * len(alive))
    mine, built = kept.EngineCache(), []

    def get(key: str, size: int = 20) -> None:
        def build() -> Graph:
            built.append(key)
            alive.add(graph := Graph())
            return graph

        mine.get(key, build, device=torch.device("cpu"), size=size)

    for key in ("a", "b", "a", "c"):
        get(key)
    assert built == ["a", "b", "c"]
    for key in ("a", "c"):
        get(key)
    assert built == ["a", "b", "c"]  # what was used longest ago, b, made room for c
    get("b")
    assert built[3:] == ["b"]
    for _ in range(2):
        get("too big", size=60)
    assert built[4:] == ["too big"] * 2


class Graph:
    """Something that is kept."""


def test_graphs_go_with_their_operator():
    kept.clear_all_caches()
    H = cs.Hessian(problem())
    H @ direction(H)
    assert kept.clear_all_caches()
    H @ direction(H)
    del H
    gc.collect()
    assert not kept.clear_all_caches()


def test_weights_that_a_pass_transposes_are_no_part_of_its_graph():
    """A graph of few tokens and many weights is not taken for one that does not fit."""
    wide = cs.TransformerConfig(n_layers=1, d_model=64, n_heads=2, n_ctx=32, vocab_size=512)
    tokens = torch.randint(512, (1, 32), generator=torch.Generator().manual_seed(0))
    p = cs.Problem(cs.load(wide), (tokens, tokens.roll(1, 1)))
    H = cs.Hessian(p)
    H @ torch.randn(H.shape[1])
    known, weights = H.engine.detector.known, 4 * p.model.num_parameters
    few = H.engine.detector.sample.batch.inputs.numel()
    assert known is not None
    assert known.entry_bytes * few < weights
    assert known.pass_bytes(H.engine.runner, p.batches[0]) > 0


def test_views_are_counted_apart():
    W = torch.randn(100, 10)
    found, everything = result_bytes(lambda: torch.ones(3, 10) @ W.t(), views=True)
    assert found.shape == (3, 100)
    assert everything == 4 * (30 + 1000 + 300)
    assert result_bytes(lambda: torch.ones(3, 10) @ W.t(), views=False)[1] == 4 * (30 + 300)
