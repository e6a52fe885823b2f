"""Models that are not to be had: one sentence that names what was expected and what came."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import curvescope as cs
from curvescope.studies.problem_config import TokenModel, load_token_model
from wrong_calls import REAL, Make, assert_one_sentence, config


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """A file, in a folder that has all a model needs otherwise."""
    cs.save(cs.load(config()), folder)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Whole(nn.Module):
    """A module with an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)


def _broken() -> cs.Model:
    found = cs.load(config())
    with torch.no_grad():
        found.get_parameter("E").fill_(torch.nan)
        found.get_parameter("L0.W_Q")[0, 0] = -torch.inf
    return found


MODELS: dict[str, tuple[Make, str]] = {
    "weights that are no numbers": (
        lambda tmp: load_token_model(TokenModel(model=str(cs.save(_broken(), tmp)))),
        r"expected finite weights, .* in E \(20 entries\), L0\.W_Q \(1 entry\)",
    ),
    "unknown name": (
        lambda _: cs.load("tiny-gbt"),
        r"expected a bundled model.* 'tiny-gbt'.*did you mean 'tiny-gpt'",
    ),
    "number": (lambda _: cs.load(3), r"expected a name, a path, a configuration or an nn\.Module, got a int"),
    "empty folder": (
        lambda tmp: cs.load(tmp),
        r"expected config\.toml and model\.safetensors in the folder .* missing",
    ),
    "other file": (
        lambda tmp: cs.load(written(tmp, "x.txt", "")),
        r"expected a folder or a \.toml file, got the file",
    ),
    "corrupt weights": (
        lambda tmp: cs.load(written(tmp, "model.safetensors", b"\x00" * 40).parent),
        r"expected weights in safetensors, could not read",
    ),
    "no toml": (
        lambda tmp: cs.load(written(tmp, "config.toml", "= 3")),
        r"expected a model configuration in TOML, could not read",
    ),
    "bytes as toml": (
        lambda tmp: cs.load(written(tmp, "a.toml", b"\xff\xfe")),
        r"expected a model configuration in TOML, could not read",
    ),
    "unknown key": (
        lambda tmp: cs.load(written(tmp, "a.toml", "n_layer = 3")),
        r"unknown setting 'n_layer' \(did you mean 'n_layers'",
    ),
    "wrong type": (
        lambda tmp: cs.load(written(tmp, "a.toml", 'n_layers = "3"')),
        r"n_layers: expected int, got '3'",
    ),
    "unknown kind": (
        lambda tmp: cs.load(written(tmp, "a.toml", 'kind = "cnn"')),
        r"kind: expected 'transformer' or 'mlp', got 'cnn'",
    ),
    "norm": (lambda _: config(norm="middle"), r"norm: expected one of none, pre, post, got 'middle'"),
    "activation": (lambda _: config(activation="tanh"), r"activation: expected one of relu, .*, got 'tanh'"),
    "width": (lambda _: config(n_heads=3), r"d_model=4 is not a multiple of n_heads"),
    "groups": (lambda _: config(n_kv_heads=3), r"n_heads=2 is not a multiple of n_kv_heads"),
    "odd rope": (lambda _: config(positions="rope", d_head=3), r"rope needs an even head size, got 3"),
    "merged rope": (
        lambda _: config(positions="rope", merged_qk=True),
        r"rope rotates queries and keys; merged_qk has neither",
    ),
    "tied images": (lambda _: config(tied=True, outputs="class", n_out=2), r"tied needs tokens in and out"),
    "no classes": (lambda _: config(outputs="class"), r"outputs='class' needs n_out"),
    "too many patches": (
        lambda _: config(inputs="patches", outputs="class", n_out=2),
        r"an image has 16 patches, n_ctx is 3",
    ),
    "no width": (lambda _: config(d_model=0), r"d_model: expected a positive number, got 0"),
    "negative depth": (lambda _: config(n_layers=-1), r"expected n_layers and d_ff of at least 0, got -1"),
    "flag as number": (lambda _: config(causal=1), r"causal: expected bool, got 1"),
    "mlp depth": (
        lambda _: cs.MLPConfig(depth=0),
        r"depth.* expected a? ?positive|expected positive sizes and depth, got",
    ),
    "unknown dtype": (
        lambda _: cs.load(config(), dtype="float8"),
        r"expected float32, float64, or .* got 'float8'",
    ),
    "whole numbers": (
        lambda _: cs.load(config(), dtype=torch.int8),
        r"expected float32, float64, or .* got torch\.int8",
    ),
    "unknown device": (
        lambda _: cs.load(config(), device="gpu"),
        r"expected a device such as cpu or cuda, got 'gpu'",
    ),
    "revision of a module": (
        lambda _: cs.load(nn.Linear(2, 2), revision="final"),
        r"expected a bundled model with revision='final', got a Linear",
    ),
    "revision of a folder": (
        lambda tmp: cs.load(tmp, revision="final"),
        r"expected a bundled model with revision='final', got \w*Path",
    ),
    "revision of a list": (
        lambda _: cs.load([1], revision="final"),
        r"expected a bundled model with revision='final', got a list",
    ),
    "unknown revision": (
        lambda _: cs.load("tiny-gpt", revision="best"),
        r"expected a revision of tiny-gpt, got 'best' .*initial",
    ),
    "no parameters": (lambda _: cs.load(Empty()), r"expected a module with parameters, but Empty has none"),
    "integer parameters": (lambda _: cs.load(Whole()), r"expected real parameters, 'w' is torch\.int64"),
    "two dtypes": (
        lambda _: cs.load(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())),
        r"expected parameters of one dtype, got several",
    ),
    "saved module": (
        lambda tmp: cs.save(cs.load(nn.Linear(1, 1)), tmp),
        r"expected a zoo model, got a Linear",
    ),
    "tuple of outputs": (
        lambda _: cs.Problem(nn.LSTM(4, 4), (REAL, REAL), "mse", output=1).loss_value(),
        r"expected one tensor of outputs, .* got a tuple of a tensor \(2, 3, 4\), a tuple of",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_bad_models_are_one_sentence(name: str, tmp_path: Path):
    call, message = MODELS[name]
    with pytest.raises(cs.CurvescopeError, match=message) as caught:
        call(tmp_path)
    assert_one_sentence(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there():
    with pytest.raises(
        cs.UsageError, match=r"expected a CUDA device, but torch sees none \(use device='cpu'\)"
    ):
        cs.load(config(), device="cuda")
