"""The residual stream of a model is its own, and what the lens reads from it are its logits."""

from __future__ import annotations

import math

import pytest
import torch
from trajectory_models import NAMES, T, V, inputs, model_of

from curvescope.geometry.stream import stream
from curvescope.geometry.trajectory.readout import readout
from curvescope.models.capture import capture


@pytest.mark.parametrize("name", NAMES)
def test_lens_at_the_last_point_is_the_models_own_logits(name):
    model = model_of(name)
    seen = stream(model, inputs())
    read = readout(model, seen)
    assert seen.points.shape == (3, T, 5, model.facts["d_model"])
    with torch.no_grad():
        truth = model.forward({}, inputs())
        torch.testing.assert_close(read.logits(seen.points[:, :, -1]), truth, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "bert"])
def test_points_between_blocks_are_the_hidden_states_of_transformers(name):
    model = model_of(name)
    points = stream(model, inputs()).points
    with torch.no_grad():
        theirs = model.module(inputs(), output_hidden_states=True).hidden_states
    for i in range(2):  # their last one has the final norm in it
        own = 1e-12 if name in ("gpt2", "bert") else 2e-6  # called directly, the others use float32 inside
        torch.testing.assert_close(points[:, :, 2 * i], theirs[i], atol=own, rtol=0)


@pytest.mark.parametrize("name", ["pre", "rmsnorm", "gpt2", "llama", "gpt_neox"])
def test_half_steps_are_what_the_sublayers_add(name):
    model = model_of(name)
    points, found = stream(model, inputs()).points, capture(model, inputs())
    for i in range(2):
        a = points[:, :, 2 * i + 1] - points[:, :, 2 * i]
        torch.testing.assert_close(a, found[f"L{i}.attn.out"], atol=1e-12, rtol=0)
        m = points[:, :, 2 * i + 2] - points[:, :, 2 * i + 1]
        torch.testing.assert_close(m, found[f"L{i}.ff.out"], atol=1e-12, rtol=0)


def test_gemmas_gain_is_one_more_than_its_parameter():
    model = model_of("gemma2")
    read = readout(model, stream(model, inputs()))
    assert read.norm.gamma is not None
    torch.testing.assert_close(read.norm.gamma, 1 + model.get_parameter("model.norm.weight").detach())
    assert read.own_end is not None  # its logits are capped


@pytest.mark.parametrize("name", ["pre", "rmsnorm", "gpt2", "llama"])
def test_cosine_to_a_token_gives_its_logit(name):
    """logit = |n(x)| cos |P(γ ∘ u)| + β · u + b, with |n(x)| = √d up to ε."""
    model = model_of(name)
    seen = stream(model, inputs())
    read = readout(model, seen)
    x = 100 * seen.points[0, :, -1]  # so that ε does not matter
    tokens = torch.arange(V)
    cosine = read.unit(x) @ read.token(tokens).T
    assert read.norm.gamma is not None
    u = read.U.T * read.norm.gamma
    size = (u - u.mean(-1, keepdim=True) if read.center else u).norm(dim=-1)
    block = model.blocks.get("ln_f.b")
    shift = 0 if block is None else read.U.T @ block.take(model.get_parameter(block.parameter))
    logits = math.sqrt(x.shape[-1]) * cosine * size + shift + (0 if read.bias is None else read.bias)
    with torch.no_grad():
        torch.testing.assert_close(logits, read.logits(x), atol=1e-8, rtol=0)
