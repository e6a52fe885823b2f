"""Points of other libraries' models: what is read is the stream, and products are those of plain hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import adapters_cases as others
import curvescope as cs
from curvescope.geometry.stream import stream
from curvescope.models.capture.activation_points import find_point, point_names, stream_points
from curvescope.models.capture.hook_sites import ActivationReader, AddedActivation
from oracles import relative_error, transformer
from selection import most, some

HALF = {  # a module of layer 0 whose output, added to the layer's input, is the middle; * is the middle
    "gpt2": "transformer.h.0.attn",
    "llama": "model.layers.0.self_attn",
    "gemma2": "model.layers.0.post_attention_layernorm",
    "gpt_neox": "gpt_neox.layers.0.attention",
    "opt": "model.decoder.layers.0.self_attn",
    "bert": "*bert.encoder.layer.0.attention.output",
    "lens": "blocks.0.hook_attn_out",
}
OUT = {  # the module that W_O is in
    "gpt2": "transformer.h.0.attn.c_proj",
    "llama": "model.layers.0.self_attn.o_proj",
    "bert": "bert.encoder.layer.0.attention.output.dense",
}
LAYERS = {
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "gemma2": "model.layers",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "bert": "bert.encoder.layer",
    "lens": "blocks",
}


@cache
def model_of(name: str) -> Any:
    if name != "lens":
        pytest.importorskip("transformers")
        return others.loaded(name)
    lens = pytest.importorskip("transformer_lens")
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 10, "d_vocab": 11, "n_ctx": 8}
    config = lens.HookedTransformerConfig(**sizes, act_fn="gelu", seed=0, device="cpu", dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        return cs.load(others.shaken(lens.HookedTransformer(config)).eval(), dtype="float64")


@contextmanager
def replaced(module: Any, name: str, side: str, value: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """PyTorch's own hooks, by hand."""
    part = module.get_submodule(name)

    def behind(_: Any, arguments: Any, out: Any) -> Any:
        return (value(out[0]), *out[1:]) if isinstance(out, tuple) else value(out)

    def before(_: Any, arguments: Any) -> Any:
        return (value(arguments[0]), *arguments[1:])

    handle = part.register_forward_hook(behind) if side == "out" else part.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def truth(model: Any, name: str, side: str, v: Tensor) -> Tensor:
    """∂²L/∂x² v by double backward through a hook that adds a leaf."""
    x, y = others.data(model.facts["kind"])
    leaf = torch.zeros(v.shape, dtype=torch.float64, requires_grad=True)
    with replaced(model.module, name, side, lambda h: h + leaf.reshape(h.shape)), others.KeepDouble():
        z = model.module(x)
    z = getattr(z, "logits", z)
    keep = y != -100
    loss = -z.log_softmax(-1)[keep].gather(-1, y[keep][:, None]).sum() / keep.sum()
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return torch.autograd.grad((slope * v).sum(), leaf)[0].flatten()


def product(model: Any, at: str, v: Tensor) -> Tensor:
    problem = cs.Problem(model, others.data(model.facts["kind"]))
    return cs.ActivationHessian(problem, at) @ v.flatten()


def direction(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", most(list(LAYERS), but=["llama", "opt", "gpt_neox"]))
def test_products_are_those_of_plain_hooks(name: str):
    model = model_of(name)
    v = direction(3, others.T, 8)
    layers = LAYERS[name]
    assert relative_error(product(model, "L1.in", v), truth(model, f"{layers}.1", "in", v)) < 1e-9
    assert relative_error(product(model, "L0.out", v), truth(model, f"{layers}.0", "out", v)) < 1e-9
    half = HALF[name].removeprefix("*")
    assert relative_error(product(model, "L0.mid", v), truth(model, half, "out", v)) < 1e-9


@pytest.mark.parametrize("name", OUT)
def test_a_head_is_some_columns_of_what_w_o_reads(name: str):
    model = model_of(name)
    v, k = direction(3, others.T, 4), 4
    wide = torch.nn.functional.pad(v, (k, 0))
    whole = truth(model, OUT[name], "in", wide).view(3, others.T, -1)
    assert relative_error(product(model, "L0.h1.out", v), whole[..., k:].flatten()) < 1e-9
    assert relative_error(product(model, "L0.attn.heads", wide), whole.flatten()) < 1e-9


@pytest.mark.parametrize("name", [*some([*LAYERS], 3), "lens", "bert"])
def test_what_is_read_is_the_stream(name: str):
    model = model_of(name)
    inputs = others.data(name)[0]
    names = stream_points(model)
    seen = ActivationReader([find_point(model, at) for at in names], len(inputs))
    with torch.no_grad():
        model.forward({}, inputs, changes=seen.changes())
    points = stream(model, inputs).points
    for i, at in enumerate(names):
        torch.testing.assert_close(seen.values[at], points[:, :, i], atol=1e-12, rtol=0)


def test_the_middle_of_a_post_norm_layer_without_gains_is_behind_its_norm():
    module: Any = transformer(norm="post", norm_affine=False)
    ids = torch.tensor([[0, 1, 2]])
    with torch.no_grad():
        x = module.embed(ids)
        middle = module.L0.ln1(x + module.L0.attend(x, lambda place, tensor: None))
    torch.testing.assert_close(stream(cs.load(module), ids).points[:, :, 1], middle)


@pytest.mark.parametrize("name", ["gpt2", "lens", "opt"])
def test_every_known_point_can_be_read_and_moved(name: str):
    model = model_of(name)
    inputs = others.data(name)[0]
    points = [find_point(model, at) for at in point_names(model)]
    seen = ActivationReader(points, len(inputs))
    with torch.no_grad():
        before = model.forward({}, inputs, changes=seen.changes())
        for point in points:
            x = seen.values[point.name]
            added = AddedActivation(point, len(inputs), direction(*x.shape))
            moved = model.forward({}, inputs, changes=added.changes())
            added.check()
            assert float((moved - before).abs().max()) > 1e-6, point.name
        torch.testing.assert_close(model.forward({}, inputs), before, atol=0, rtol=0)


def test_the_end_of_a_llama_is_its_last_norm():
    model = model_of("llama")
    v = direction(3, others.T, 8)
    assert relative_error(product(model, "final", v), truth(model, "model.norm", "out", v)) < 1e-9
