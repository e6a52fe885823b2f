"""One cell of the grid: a Transformer is trained on its own data, and its losses and curvature are measured.

Nothing is shared between cells but the language: weights, training data, held-out data and probes of each
cell come from streams of their own, so that cells and seeds are independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.data.tasks.markov import markov, markov_transitions
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import GGN, FunctionalHessian, Hessian
from curvescope.problem import Problem
from curvescope.studies.scaling.needed import Needed, plan_data
from curvescope.studies.scaling.setting import LENGTH, VOCAB, Config
from curvescope.train import TrainConfig, train

AT_ONCE = 512  # sequences that losses are taken of together


class Place(NamedTuple):
    """Where a cell is in the grid."""

    width: int
    sequences: int
    seed: int

    @property
    def name(self) -> str:
        """Of its piece of work."""
        return f"cell.d{self.width}.n{self.sequences}.s{self.seed}"


@dataclass(frozen=True)
class Cell(Result):
    """What was measured at the end of training."""

    width: int
    sequences: int
    seed: int
    num_parameters: int
    train_loss: float  # mean over the training data
    held_out_loss: float
    held_out_stderr: float  # over held-out sequences
    excess: float  # of the held-out loss over that of the language itself, on the same sequences
    excess_stderr: float
    gradient_norm: float  # of the loss whose curvature is measured
    hessian: OwnProbes
    ggn: OwnProbes
    functional: OwnProbes  # H − H_o
    needed: Needed

    @property
    def tokens(self) -> int:
        """Targets of the training data."""
        return self.sequences * LENGTH

    def ends(self) -> tuple[float, float, float, float]:
        """λ_max of H and its error, λ_min and its: an eigenvalue lies within."""
        found = self.hessian.ends
        assert found is not None
        (low, high), (low_error, high_error) = found.values, found.residuals
        return float(high), float(high_error), float(low), float(low_error)

    def top(self) -> tuple[float, float]:
        """λ_max of the GGN and its error."""
        found = self.ggn.ends
        assert found is not None
        return float(found.values[1]), float(found.residuals[1])

    def rank(self) -> tuple[float, float]:
        """tr² / ‖·‖_F² of the GGN: how many equal eigenvalues would have its trace and norm; its error."""
        trace, norm = self.ggn.trace, self.ggn.norm
        value = (trace / norm) ** 2
        parts = (self.ggn.trace_stderr / trace, self.ggn.norm_stderr / norm)
        return value, 2 * value * math.hypot(*parts)

    def gap(self) -> tuple[float, float]:
        """‖H − H_o‖_F / ‖H‖_F and its error."""
        value = self.functional.norm / self.hessian.norm
        parts = (
            self.functional.norm_stderr / self.functional.norm,
            self.hessian.norm_stderr / self.hessian.norm,
        )
        return value, value * math.hypot(*parts)


def measure_cell(cfg: Config, place: Place) -> Cell:
    """Train the model of a cell and measure it."""
    weights, data, held_out, fresh, probes = _streams(cfg, place)
    sample = _sample(cfg, place.sequences, data)
    model = _trained(cfg, place, sample, seed=weights)
    test = _sample(cfg, cfg.held_out, held_out)
    others = _losses(model, test)
    excess = others - _least_losses(cfg, test)
    new = _losses(model, _sample(cfg, cfg.fresh, fresh))
    problem = Problem(model, _measured(cfg, sample, held_out))
    measured = partial(own_probes, num_probes=cfg.num_probes, max_exact=cfg.max_exact, seed=probes)
    few = max(1, cfg.num_steps // 3)
    return Cell(
        width=place.width,
        sequences=place.sequences,
        seed=place.seed,
        num_parameters=model.num_parameters,
        train_loss=float(_losses(model, sample).mean()),
        held_out_loss=float(others.mean()),
        held_out_stderr=_stderr(others),
        excess=float(excess.mean()),
        excess_stderr=_stderr(excess),
        gradient_norm=float(problem.gradient().norm()),
        hessian=measured(Hessian(problem), num_steps=cfg.num_steps),
        ggn=measured(GGN(problem), num_steps=few),
        functional=measured(FunctionalHessian(problem), num_steps=few),
        needed=plan_data(others, new, tolerance=cfg.tolerance),
    )


def _stderr(samples: np.ndarray) -> float:
    return float(samples.std(ddof=1) / math.sqrt(len(samples)))


def _streams(cfg: Config, place: Place) -> list[int]:
    """Seeds of weights, training data, held-out data, fresh data and probes."""
    source = np.random.SeedSequence([cfg.seed & 0xFFFFFFFF, *place])
    return [int(seed) for seed in source.generate_state(5)]


def _sample(cfg: Config, count: int, seed: int) -> Batches:
    """Sequences of the language."""
    size = min(cfg.batch_size, count)
    return markov(
        num_sequences=count, length=LENGTH, vocab=VOCAB, seed=cfg.seed, sample_seed=seed, batch_size=size
    )


def _measured(cfg: Config, sample: Batches, held_out: int) -> Batches:
    """The data of the Hessian: the first sequences trained on, or held-out ones, in one batch."""
    chosen = sample if cfg.curvature_on == "train" else _sample(cfg, cfg.measured, held_out)
    inputs, targets = _whole(chosen)
    return Batches.from_tensors(inputs[: cfg.measured], targets[: cfg.measured], name="markov")


def _trained(cfg: Config, place: Place, sample: Batches, *, seed: int) -> Model:
    shape = TransformerConfig(
        n_layers=cfg.size.layers,
        d_model=place.width,
        n_heads=cfg.size.heads,
        n_ctx=LENGTH,
        vocab_size=VOCAB,
        seed=seed,
    )
    model = load(Transformer(shape), dtype="float32", device=cfg.device)
    steps = cfg.num_train_steps
    options = TrainConfig(steps=steps, lr=cfg.lr, warmup=min(50, steps // 4), weight_decay=cfg.weight_decay)
    return train(model, sample, options)[0]


def _whole(sample: Batches) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all batches."""
    inputs = torch.cat([batch.inputs for batch in sample])  # pyright: ignore[reportCallIssue, reportArgumentType]
    return inputs, torch.cat([batch.targets for batch in sample])


def _least_losses(cfg: Config, sample: Batches) -> np.ndarray:
    """The mean loss of each sequence under the language's own probabilities, (n,)."""
    inputs, targets = _whole(sample)
    P = markov_transitions(VOCAB, seed=cfg.seed)
    return -P[inputs, targets].log().mean(dim=1).numpy()


@torch.no_grad()
def _losses(model: Model, sample: Batches) -> np.ndarray:
    """The mean loss of each sequence, (n,)."""
    pairs = zip(*(whole.split(AT_ONCE) for whole in _whole(sample)), strict=True)
    return torch.cat([_sequence_losses(model, x, y) for x, y in pairs]).double().cpu().numpy()


def _sequence_losses(model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model.evaluate(inputs)
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="none"
    )
    return flat.reshape(targets.shape).mean(dim=1)
