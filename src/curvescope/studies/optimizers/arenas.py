"""Where optimizers are compared: a model at random weights, batches for its steps, data for its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks import task_data
from curvescope.data.text import text_data
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem

DIGITS, WIDTH = 2, 32
SEQ_LEN, TOKENS = 16, 24_576
HELD_OUT = 64  # sequences of text; of addition twice as many
BUDGETS = {"addition": 150.0, "tiny-gpt": 35.0}
"""The budget of a run, in gradients, by arena."""


class Arena(NamedTuple):
    """What one seed of one arena gives to every optimizer alike."""

    model: Model
    batches: Batches  # in the order of the steps
    held_out: Problem

    def batch(self, step: int) -> Batch:
        """The batch of a step; they are read round and round."""
        return self.batches[step % len(self.batches)]


def addition(seed: int, batch_size: int, device: str) -> Arena:
    """Sums of two numbers of two digits, by a Transformer of one layer (Ormaniec et al., 2025).

    Held-out sums are drawn anew: with 10,000 of them in all, some are among those of training.
    """
    shape = TransformerConfig(
        n_layers=1, d_model=WIDTH, n_heads=4, n_ctx=3 * DIGITS + 3, vocab_size=12, init="scaled", seed=seed
    )
    model = load(Transformer(shape), dtype="float32", device=device)
    many = {"num_sequences": 256 * batch_size, "digits": DIGITS, "batch_size": batch_size}
    others = task_data("addition", num_sequences=2 * HELD_OUT, digits=DIGITS, seed=seed + 1_000_003)
    return Arena(model, task_data("addition", **many, seed=seed), Problem(model, others))


def tiny_gpt(seed: int, batch_size: int, device: str) -> Arena:
    """The bundled model's shape with weights of its own, on the bundled text; some windows are held out."""
    bundled = load("tiny-gpt", dtype="float32", device=device)
    module = bundled.module
    assert isinstance(module, Transformer)
    model = load(Transformer(replace(module.cfg, seed=seed)), dtype="float32", device=device)
    windows = list(text_data("sample", bundled, tokens=TOKENS, seq_len=SEQ_LEN, batch_size=1))
    others, rest = windows[:HELD_OUT], windows[HELD_OUT:]
    order = _order(len(rest), seed)
    cut = [order[i : i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]
    batches = Batches([_joined([rest[i] for i in part]) for part in cut], name="text:sample")
    return Arena(model, batches, Problem(model, Batches([_joined(others)], name="held out")))


def _order(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=generator(seed, 1)).tolist()


def _joined(windows: list[Batch]) -> Batch:
    """One batch of single sequences."""
    inputs, targets = (
        torch.cat(parts) for parts in zip(*((w.inputs, w.targets) for w in windows), strict=True)
    )
    return Batch(inputs, targets)


ARENAS: dict[str, Callable[[int, int, str], Arena]] = {"addition": addition, "tiny-gpt": tiny_gpt}


@lru_cache(maxsize=16)
def arena(name: str, seed: int, batch_size: int, device: str) -> Arena:
    """One of ARENAS, kept for all optimizers: runs train copies of its model."""
    return ARENAS[name](seed, batch_size, device)
