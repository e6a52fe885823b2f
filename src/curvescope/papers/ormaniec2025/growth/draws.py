"""What is random in a sweep: weights, embeddings and probes of a repeat, by our own seeds or by the paper's.

Own seeds: one draw of the embeddings per repeat, scaled along σ, or a fresh one at every scale (`redraw`);
the probes of a block are the same at every scale. The paper's (`replay`): see `streams`; embeddings are fresh
at every scale, and so are the probes, 20 for each of H, H_o and H_f.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from curvescope.core import seeds
from curvescope.core.parts import Symbol
from curvescope.data.tasks.algorithmic import addition
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.papers.ormaniec2025.growth import streams
from curvescope.papers.ormaniec2025.growth.settings import (
    CONTEXT,
    EXPERIMENTS,
    REPEATS,
    VOCABULARY,
    WIDTH,
    Experiment,
)

_WEIGHTS, _EMBEDDINGS, _PROBES = range(3)  # children of a repeat's seed
_STREAM_PARTS: tuple[Symbol, ...] = ("H", "H_o", "H_f")  # in the order in which the paper draws probes


@dataclass(frozen=True)
class Source:
    """Where the random numbers of one repeat come from."""

    experiment: Experiment
    repeat: int
    seed: int
    replay: bool
    redraw: bool
    device: str

    def weights(self) -> dict[str, Tensor]:
        """All weights but the embeddings, by the zoo's names, in float64; drawn in float32."""
        if self.experiment.family == "mlp":
            found = self._mlp_weights()
        else:
            module = Transformer(_transformer(self.experiment, self._model_seed()))
            found = {name: p.detach().double() for name, p in module.named_parameters()}
        return {name: W.to(self.device) for name, W in found.items() if name not in ("E", "P")}

    def embeddings(self, index: int) -> tuple[Tensor, Tensor]:
        """E (12, d) and P (18, d) at scale number `index`; P is zero for an MLP, which has no positions."""
        shapes = (VOCABULARY, WIDTH), (CONTEXT, WIDTH)
        sigma = float(self.experiment.sigmas[index])
        if self.experiment.family == "mlp":
            P = torch.zeros(shapes[1], dtype=torch.float64)
            E = self._mlp_embedding(index, sigma) if self.replay else self._own(0, shapes[0], index, sigma)
        elif self.replay:
            key = streams.SEED + self.repeat
            E, P = (streams.cuda_normal(s, sigma, seed=key, call=2 * index + i) for i, s in enumerate(shapes))
        else:
            E, P = (self._own(i, shape, index, sigma) for i, shape in enumerate(shapes))
        return E.to(self.device), P.to(self.device)

    def probes(self, index: int, layer: int, block: str, part: Symbol, num: int) -> Tensor:
        """Rademacher probes of a block, (num, d, d); by own seeds the same for every part and scale."""
        if not self.replay:
            which = (self.repeat, _PROBES, layer, int(block == "W_V"))
            return _own_probes(_child(self.seed, *which), num, self.device)
        depth, size = self.experiment.depth, WIDTH * WIDTH
        place = ((index * depth + layer) * 2 + int(block == "W_V")) * 3 + _STREAM_PARTS.index(part)
        total = len(self.experiment.sigmas) * depth * 6 * streams.PROBES
        drawn = streams.rademacher(self.repeat, place * streams.PROBES, num, size, total=total)
        return drawn.reshape(num, WIDTH, WIDTH).to(self.device)

    def _model_seed(self) -> int:
        return streams.SEED + self.repeat if self.replay else _child(self.seed, self.repeat, _WEIGHTS)

    def _own(self, which: int, shape: tuple[int, ...], index: int, sigma: float) -> Tensor:
        stream = (self.repeat, _EMBEDDINGS, which, *([index] if self.redraw else []))
        return sigma * torch.randn(shape, generator=seeds.generator(self.seed, *stream), dtype=torch.float64)

    def _mlp_weights(self) -> dict[str, Tensor]:
        depth = self.experiment.depth
        if not self.replay:
            config = MLPConfig(
                d_in=WIDTH, d_hidden=WIDTH, d_out=VOCABULARY, depth=depth, activation="identity",
                seed=self._model_seed(),
            )  # fmt: skip
            return {name: p.detach().double() for name, p in MLP(config).named_parameters()}
        first, bound = self._mlp_call() + 1, 1 / math.sqrt(WIDTH)
        sizes = [WIDTH] * (depth - 1) + [VOCABULARY]
        return {
            f"W_{i + 1}": streams.cuda_uniform((size, WIDTH), bound, seed=streams.SEED, call=first + i).T
            for i, size in enumerate(sizes)
        }

    def _mlp_embedding(self, index: int, sigma: float) -> Tensor:
        call = self._mlp_call() + 1 + self.experiment.depth + index
        return streams.cuda_normal((VOCABULARY, WIDTH), sigma, seed=streams.SEED, call=call)

    def _mlp_call(self) -> int:
        """Calls of the GPU's generator before this repeat: one seed for all MLPs, by depth and repeat.

        A repeat takes one call for its embedding, one for each layer and one for each scale.
        """
        scales = len(self.experiment.sigmas)
        before = sum(
            REPEATS * (1 + e.depth + scales)
            for e in EXPERIMENTS.values()
            if e.family == "mlp" and e.depth < self.experiment.depth
        )
        return before + self.repeat * (1 + self.experiment.depth + scales)


def sweep_tokens() -> Tensor:
    """The batch of all sweeps: (64, 18)."""
    tokens = next(iter(addition())).inputs
    assert isinstance(tokens, Tensor)
    return tokens


def _transformer(experiment: Experiment, seed: int) -> TransformerConfig:
    linear = experiment.family == "linear"
    return TransformerConfig(
        n_layers=experiment.depth, d_model=WIDTH, n_heads=1, n_ctx=CONTEXT, vocab_size=VOCABULARY,
        d_ff=0 if linear else None, attention="linear" if linear else "softmax", norm=experiment.norm,
        activation="relu", residual_scale=0.0 if linear else 1.0, init="scaled", seed=seed,
    )  # fmt: skip


def _child(seed: int, *stream: int) -> int:
    return seeds.generator(seed, *stream).initial_seed()


@lru_cache(maxsize=16)
def _own_probes(seed: int, num: int, device: str) -> Tensor:
    drawn = seeds.probes(WIDTH * WIDTH, num, seed=seed)
    return drawn.T.reshape(num, WIDTH, WIDTH).to(device)
