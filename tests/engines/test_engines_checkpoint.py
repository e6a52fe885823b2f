"""Layers computed again: the same products, in less memory, and the model as it was."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import curvescope as cs
from curvescope.core.errors import CurvescopeError
from curvescope.engines import batch_products
from curvescope.engines.checkpoint import RecomputeCheck, checkpointed
from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.running.patching import patched
from curvescope.studies.hvp.analysis import GPT2
from selection import pairs

MAKERS = {
    "hessian": cs.Hessian,
    "ggn": cs.GGN,
    "functional": cs.FunctionalHessian,
    "empirical": cs.EmpiricalFisher,
    "mc": cs.MonteCarloFisher,
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(**changes) -> cs.Problem:
    shape = {"n_layers": 3, "d_model": 4, "n_heads": 2, "n_ctx": 6, "vocab_size": 7} | changes
    model = cs.load(cs.TransformerConfig(**shape), dtype="float64")
    tokens = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(0))
    return cs.Problem(model, cs.Batches.from_tensors(tokens, tokens.roll(1, 1), batch_size=2))


@pytest.mark.parametrize(("name", "engine"), pairs(list(MAKERS), ["fast", "autograd", "auto"], every=2))
def test_products_are_the_same(name, engine):
    p = problem(n_layers=2)
    ours = MAKERS[name](p, engine=engine, checkpoint=True)
    theirs = MAKERS[name](p, engine="autograd")
    V = draw(ours.shape[1], 2)
    want = theirs @ V
    assert float(want.norm()) > 1e-6
    torch.testing.assert_close(ours @ V, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours @ V[:, 0], want[:, 0], rtol=1e-9, atol=1e-12)
    W = draw(p.space("L1.*").size)
    pair = ("L0.*", "L1.*")
    torch.testing.assert_close(ours.block(*pair) @ W, theirs.block(*pair) @ W, rtol=1e-9, atol=1e-12)


LAYERS = [
    {"norm_kind": "rmsnorm", "activation": "swiglu", "positions": "rope"},
    {"norm": "post", "tied": True},
    {"attention": "linear", "norm": "none"},
]


@pytest.mark.parametrize(("changes", "name"), pairs(LAYERS, ["hessian", "ggn"]), ids=str)
def test_every_kind_of_layer(name, changes):
    p = problem(n_layers=2, **changes)
    v = draw(p.space().size)
    want = MAKERS[name](p, engine="autograd") @ v
    torch.testing.assert_close(MAKERS[name](p, checkpoint=True) @ v, want, rtol=1e-8, atol=1e-12)


def kept_bytes(p: cs.Problem, *, checkpoint: bool) -> int:
    """Size of all that autograd keeps between products with the Hessian, parameters left out."""
    sizes = {}

    def pack(t):
        sizes[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()
        return t

    H = cs.Hessian(p, engine="autograd", checkpoint=checkpoint)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        H @ draw(H.shape[1])
    gc.collect()
    own = {StorageWeakRef(t.untyped_storage()) for t in p.model.module.parameters()}
    return sum(size for ref, size in sizes.items() if not ref.expired() and ref not in own)


def test_layers_are_not_kept():
    p = problem(n_layers=8, d_model=16, vocab_size=7)
    whole = kept_bytes(p, checkpoint=False)
    assert kept_bytes(p, checkpoint=True) < whole / 3


def test_the_model_is_left_as_it_was():
    p = problem()
    layers = repeated_layers(p.model.module)
    assert len(layers) == 3
    calls = []
    handle = layers[1].register_forward_hook(lambda *_: calls.append(1))
    with patched(checkpointed(p.model, lambda layer: torch.enable_grad, RecomputeCheck())):
        p.model.module(p.batches[0].inputs).sum().backward()
        assert all("forward" in vars(layer) for layer in layers)
    assert len(calls) == 1  # not again when the layer is computed again
    assert not any("forward" in vars(layer) for layer in layers)
    handle.remove()
    layers_changed = checkpointed(p.model, lambda layer: torch.enable_grad, RecomputeCheck())
    with pytest.raises(RuntimeError, match="on purpose"), patched(layers_changed):
        raise RuntimeError("on purpose")
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_third_derivative_is_refused():
    p = problem()
    with patched(checkpointed(p.model, lambda layer: torch.enable_grad, RecomputeCheck())):
        loss = p.model.module(p.batches[0].inputs).square().sum()
    parameters = list(p.model.module.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    size = sum(g.square().sum() for g in first)
    with pytest.raises(cs.CurvescopeError, match="differentiate it again"):
        torch.autograd.grad(size, parameters, create_graph=True)


def test_the_largest_repetition_is_taken():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
            self.large = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)) for _ in range(2))

    module = Two()
    assert repeated_layers(module) == list(module.large)
    assert repeated_layers(nn.Linear(2, 2)) == []
    module.tables = nn.ModuleDict({"words": nn.Embedding(500, 8), "places": nn.Embedding(500, 8)})
    assert repeated_layers(module) == list(module.large)
    alone = cs.Problem(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (torch.ones(1, 2), torch.ones(1, 2)), "mse")
    with pytest.raises(cs.UsageError, match="repeated layers"):
        cs.Hessian(alone, checkpoint=True) @ torch.ones(6)


@pytest.mark.usefixtures("few_sequences")
def test_studies_take_it(tmp_path):
    from curvescope.studies import blocks

    path = tmp_path / "small.toml"
    path.write_text("n_layers = 2\nd_model = 4\nn_heads = 2\nvocab_size = 3\nn_ctx = 11\n", encoding="utf-8")
    few = {
        "model": str(path),
        "data": "task:sorting",
        "batch_size": 64,
        "operators": ["hessian"],
        "norms": ["L0.ln1.g"],
        "num_trace_probes": 2,
        "num_norm_probes": 2,
        "num_sharp_steps": 2,
        "max_exact": 0,
        "dtype": "float64",
    }
    whole, again = (
        blocks.run(blocks.Config.from_dict({**few, "checkpoint": c})).tables() for c in (False, True)
    )
    for name, table in whole.items():
        numbers = table.select_dtypes("number")
        torch.testing.assert_close(
            torch.tensor(again[name][numbers.columns].to_numpy(dtype=float)),
            torch.tensor(numbers.to_numpy(dtype=float)),
            rtol=1e-6,
            atol=1e-9,
            equal_nan=True,
        )


def test_layers_are_computed_again_where_memory_runs_out(monkeypatch, caplog):
    tokens = torch.zeros(2, 8).long(), torch.ones(2, 8).long()
    of_gpt2 = cs.Problem(GPT2(3, 16, 2, 11, 8).double(), tokens)
    v = draw(of_gpt2.space().size)
    expected = cs.Hessian(of_gpt2) @ v
    plain = batch_products.second_derivative

    def short_of_memory(problem, runner, batch, *rest):
        if batch.num_sequences > 1 and not runner.checkpoint:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(problem, runner, batch, *rest)

    monkeypatch.setattr(batch_products, "second_derivative", short_of_memory)
    H = cs.Hessian(of_gpt2)
    with caplog.at_level("WARNING", logger="curvescope"):
        torch.testing.assert_close(H @ v, expected)
    assert "layers are recomputed" in caplog.text
    with H.frozen():
        torch.testing.assert_close(H @ v, expected)
    assert not H.engine.checkpoint  # what was asked for


def test_layers_are_computed_again_behind_a_graph_that_was_too_large_to_keep(caplog):
    p = problem()
    H, v = cs.Hessian(p), draw(p.space().size)
    expected = H @ v
    H.engine.caching.overflowed = True  # as a GPU notes it
    with caplog.at_level("WARNING", logger="curvescope"):
        torch.testing.assert_close(H @ v, expected)
        torch.testing.assert_close(H @ v, expected)
    assert caplog.text.count("layers are recomputed") == 1


def test_a_module_without_layers_says_that_memory_ran_out(monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    small = cs.Problem(nn.Linear(3, 2), (torch.ones(4, 3), torch.zeros(4).long()))
    monkeypatch.setattr(batch_products, "second_derivative", no_memory)
    with pytest.raises(CurvescopeError, match="memory ran out"):
        cs.Hessian(small) @ torch.ones(8)
