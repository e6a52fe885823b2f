"""The network of the study and its training: a one-block vision Transformer, post-norm, mean-pooled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import to_numpy
from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks.pictures import Pictures, pictures
from curvescope.models.model import Model
from curvescope.models.zoo.folder import zoo_model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem
from curvescope.studies.full_hessian.settings import Config
from curvescope.train import Stream, TrainConfig, train

MOST_IMAGES = 10_000  # of a large dataset, unless told otherwise
SMALL, SMALL_PATCH, PATCH = 8, 2, 4  # pictures of 8 × 8 are cut into patches of 2 × 2, others of 4 × 4
EVALUATIONS = 100  # of the validation accuracy during training
SLOW_START = 50  # steps of warm-up, fewer in a short training
PATH = (
    "E", "P", "L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O", "L0.ln1.g", "L0.ln1.b",
    "L0.W_1", "L0.b_1", "L0.W_2", "L0.b_2", "L0.ln2.g", "L0.ln2.b", "U", "b_U",
)  # fmt: skip
"""Blocks on their way from the input to the output."""


@dataclass(frozen=True)
class Trained(Result):
    """One network on its way: weights as vectors over all blocks, in the order of its model."""

    seed: int
    steps: np.ndarray  # (S,) after which weights are kept
    weights: np.ndarray  # (S, n)
    trained_step: int  # the first evaluated one with enough accuracy, or the last
    trained_weights: np.ndarray  # (n,)
    reached: bool  # enough accuracy
    evaluated: np.ndarray  # (A,) steps
    accuracy: np.ndarray  # (A,) share of the validation pictures
    loss: np.ndarray  # (steps,) of each step's own batch

    @property
    def trained_accuracy(self) -> float:
        """At the trained step."""
        return float(self.accuracy[self.evaluated == self.trained_step][0])


def read_pictures(cfg: Config) -> Pictures:
    """The pictures of all networks, cut in two with the first seed."""
    num = cfg.num_images if cfg.data == "digits" or cfg.num_images is not None else MOST_IMAGES
    found = pictures(cfg.data, num=num, seed=cfg.seed)
    if cfg.batch_size > len(found.classes):
        raise UsageError(f"batch_size: expected at most {len(found.classes)} pictures, got {cfg.batch_size}")
    return found


def make_model(cfg: Config, seed: int, data: Pictures) -> Model:
    """A fresh network; attention has no biases, as in the paper's formulas."""
    channels, size = data.images.shape[1:3]
    patch = cfg.patch_size if cfg.patch_size is not None else SMALL_PATCH if size <= SMALL else PATCH
    if not 1 <= patch <= size or size % patch:
        raise UsageError(f"patch_size: expected a divisor of {size}, the side of the pictures, got {patch}")
    if cfg.d_model % cfg.n_heads:
        raise UsageError(f"n_heads: expected a divisor of d_model={cfg.d_model}, got {cfg.n_heads}")
    zoo = TransformerConfig(
        n_layers=1, d_model=cfg.d_model, n_heads=cfg.n_heads, d_ff=cfg.d_ff, n_ctx=(size // patch) ** 2,
        inputs="patches", outputs="class", n_out=data.num_classes, image_size=size, patch_size=patch,
        channels=channels, norm="post", causal=False, activation="relu", bias_qkv=False, bias_o=False,
        bias_u=True, init=cfg.init, seed=seed,
    )  # fmt: skip
    module = Transformer(zoo).to(cfg.device, getattr(torch, cfg.dtype))
    return zoo_model(module, name=f"one-block ViT on {cfg.data}")


def make_stream(cfg: Config, seed: int, data: Pictures) -> Stream:
    """The batch of every step: each epoch in an order of its own, drawn from (seed, epoch)."""
    per_epoch = len(data.classes) // cfg.batch_size

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(data.classes), generator=generator(seed, epoch))
        chosen = order[place * cfg.batch_size : (place + 1) * cfg.batch_size]
        return Batch(data.images[chosen], data.classes[chosen])

    return batch


def make_problem(cfg: Config, seed: int, data: Pictures) -> Problem:
    """The network before training, on the batch of the first step."""
    first = make_stream(cfg, seed, data)(0)
    return Problem(make_model(cfg, seed, data), Batches([first], name=cfg.data))


def train_one(cfg: Config, seed: int, data: Pictures) -> Trained:
    """Train the network of a seed, with weights at `cfg.points` and where the accuracy is first enough."""
    model = make_model(cfg, seed, data)
    every = max(1, cfg.steps // EVALUATIONS)
    evaluated = sorted({*range(0, cfg.steps + 1, every), cfg.steps})
    how = TrainConfig(
        steps=cfg.steps,
        lr=cfg.lr,
        warmup=min(SLOW_START, max(1, cfg.steps // 10)),
        weight_decay=cfg.weight_decay,
        snapshots=tuple(sorted({*cfg.points, *evaluated})),
    )
    _, history, kept = train(model, make_stream(cfg, seed, data), how)
    accuracy = np.array([_accuracy(model, kept[step], data) for step in evaluated])
    enough = np.flatnonzero(accuracy[1:] > cfg.until) + 1
    chosen = evaluated[enough[0]] if len(enough) else cfg.steps
    space = model.space()

    def vector(step: int) -> np.ndarray:
        return to_numpy(space.gather(kept[step]))

    return Trained(
        seed=seed,
        steps=np.array(cfg.points),
        weights=np.stack([vector(step) for step in cfg.points]),
        trained_step=chosen,
        trained_weights=vector(chosen),
        reached=len(enough) > 0,
        evaluated=np.array(evaluated),
        accuracy=accuracy,
        loss=history.loss,
    )


def _accuracy(model: Model, weights: dict[str, Tensor], data: Pictures) -> float:
    """Share of the validation pictures whose largest logit is that of their class."""
    placed = {name: value.to(model.device) for name, value in weights.items()}
    with torch.no_grad():
        logits = model.forward(placed, data.validation_images.to(model.device, model.dtype))
    return float((logits.argmax(-1).cpu() == data.validation_classes).double().mean())


def at(problem: Problem, weights: np.ndarray) -> Problem:
    """The problem at weights that are kept."""
    return problem.at(torch.as_tensor(weights, dtype=problem.dtype, device=problem.device))
