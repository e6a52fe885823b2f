"""Models and data of the experiments: small Transformers made for a task, or what a person named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks import task_data, task_options
from curvescope.models.model import Model
from curvescope.models.zoo.folder import zoo_model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem
from curvescope.studies.dynamics.settings import AUTO, DIGITS, SAMPLE, SMALL, Config
from curvescope.studies.setting import TASK, make_problem

Norm = Literal["none", "pre", "post"]
WIDTH, HEADS, HIDDEN, STD = 24, 2, 48, 0.12  # of the small model; STD of its weights
GROK_WIDTH, GROK_HEADS, GROK_HIDDEN = 32, 4, 64
ANSWER = 2  # the position of "=" in a b =


def problem_of(
    cfg: Config, *, seed: int = 0, norm: Norm = "pre", layers: int = 1, loss: str = AUTO
) -> Problem:
    """The small model of a seed on its task; or the model that was named, for which all seeds are one.

    Classes of pictures are compared by squared error, as Cohen et al. (2021) do, unless a loss is asked for.
    """
    if cfg.model != SMALL:
        return make_problem(replace(cfg, data=SAMPLE if cfg.data == AUTO else cfg.data))
    batches = read_task(cfg)
    model = small_model(batches, cfg, seed=seed, norm=norm, layers=layers)
    wanted = loss if cfg.loss == AUTO else cfg.loss
    classes = not batches[0].targets.is_floating_point()
    if wanted == AUTO and classes and batches[0].targets.dim() == 1:
        return Problem(model, with_one_hot(batches, model), loss="mse")
    return Problem(
        model, batches, loss=wanted if wanted != AUTO else "cross_entropy" if classes else "mse_mean"
    )


def read_task(cfg: Config) -> Batches:
    """The task of the small model, `num_sequences` of it where it has so many."""
    data = DIGITS if cfg.data == AUTO else cfg.data
    if not data.startswith(TASK):
        raise UsageError(
            f"expected a task for the small model, got {data!r}", hint="curvescope run dynamics tiny-gpt"
        )
    name = data.removeprefix(TASK)
    own = {"num_sequences": cfg.num_sequences, "dtype": cfg.dtype}
    return task_data(name, **{key: value for key, value in own.items() if key in task_options(name)})


def small_model(batches: Batches, cfg: Config, *, seed: int, norm: Norm, layers: int) -> Model:
    """A Transformer of width 24 for the inputs and targets of these batches."""
    inputs, targets = batches[0].inputs, batches[0].targets
    assert isinstance(inputs, Tensor)
    most = max(int(torch.as_tensor(b.targets).max()) for b in batches) + 1
    if inputs.dim() == 4:
        size = inputs.shape[-1]
        shape: dict[str, Any] = {
            "inputs": "patches", "outputs": "class", "n_out": most, "image_size": size, "patch_size": 2,
            "n_ctx": (size // 2) ** 2, "causal": False,
        }  # fmt: skip
    elif inputs.is_floating_point():
        shape = {"inputs": "continuous", "outputs": "regression", "d_in": inputs.shape[-1]}
        shape |= {"n_out": targets.shape[-1], "n_ctx": inputs.shape[1], "causal": False}
    else:
        tokens = max(most, *(int(b.inputs.max()) + 1 for b in batches))  # pyright: ignore
        shape = {"vocab_size": tokens, "n_ctx": inputs.shape[1]}
    zoo = TransformerConfig(
        n_layers=layers, d_model=WIDTH, n_heads=HEADS, d_ff=HIDDEN, init="scaled", init_std=STD, norm=norm,
        seed=seed, **shape,
    )  # fmt: skip
    name = f"{norm}-norm Transformer of {layers} layer{'s' if layers > 1 else ''}"
    return zoo_model(Transformer(zoo).to(cfg.device, getattr(torch, cfg.dtype)), name=name)


def with_one_hot(batches: Batches, model: Model) -> Batches:
    """Classes (B,) as rows of the identity, (B, classes)."""
    count = int(model.facts["n_out"])
    found = [Batch(b.inputs, one_hot(b.targets, count).to(model.dtype), b.weights) for b in batches]
    return Batches(found, name=batches.name)


Evaluate = Callable[[Model], tuple[float, float, float]]


def modular_addition(cfg: Config, seed: int) -> tuple[Problem, Evaluate]:
    """Addition modulo p, part of the pairs to train on; the function gives accuracy, and both held out."""
    options: dict[str, Any] = {"p": cfg.modulus, "fraction": cfg.fraction, "seed": seed}
    kept, rest = (
        task_data("modular_addition", **options),
        task_data("modular_addition", **options, held_out=True),
    )
    zoo = TransformerConfig(
        n_layers=1, d_model=GROK_WIDTH, n_heads=GROK_HEADS, d_ff=GROK_HIDDEN, n_ctx=3,
        vocab_size=cfg.modulus + 1, norm="none", activation="relu", init="scaled", bias_qkv=False,
        bias_o=False, bias_ff=False, seed=seed,
    )  # fmt: skip
    module = Transformer(zoo).to(cfg.device, getattr(torch, cfg.dtype))
    problem = Problem(zoo_model(module, name=f"Transformer without norms, p = {cfg.modulus}"), kept)

    def evaluate(model: Model) -> tuple[float, float, float]:
        return _answers(model, kept)[1], *_answers(model, rest)

    return problem, evaluate


def _answers(model: Model, batches: Batches) -> tuple[float, float]:
    """Mean loss and share of right answers."""
    batch = batches[0].map(lambda t: t.to(model.device))
    with torch.no_grad():
        logits, y = model.forward({}, batch.inputs)[:, ANSWER], batch.targets[:, ANSWER]
    return float(cross_entropy(logits, y)), float((logits.argmax(-1) == y).double().mean())
