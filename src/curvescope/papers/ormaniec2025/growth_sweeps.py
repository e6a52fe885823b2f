"""The sweeps of the paper: network, loss, scales of the embeddings, random numbers and norms.

All sweeps have 64 sums of two five-digit numbers in one batch, d = 128, one head, ReLU, and 20 repeats with
weights N(0, 0.64/d). Names are experiment, norm, loss, grid and depth, as in the published result files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.attention.block_norms import HeadNorms
from curvescope.closed_form.network.one_head.inner import Block, Suffix, suffix
from curvescope.closed_form.network.one_head.layers import Task, forward, last_blocks, pre_norm_blocks
from curvescope.core import seeds
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.hessian_terms import PART_OF, SYMBOLS, Symbol
from curvescope.data.tasks.algorithmic import addition
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig

Family = Literal["softmax", "linear", "mlp"]
PARTS: tuple[Symbol, ...] = tuple(SYMBOLS.values())
WIDTH, VOCABULARY, CONTEXT = 128, 12, 18
REPEATS = 20

GRIDS = {
    "log": np.logspace(-2, 1, 20),
    "linear": np.linspace(0.1, 10, 20),
    "linear_short": np.linspace(0.1, 1, 20),
    "log_short": np.logspace(-1, 0, 20),
}
_WEIGHTS, _EMBEDDINGS, _PROBES = range(3)  # children of a repeat's seed
_STREAM_PARTS: tuple[Symbol, ...] = ("H", "H_o", "H_f")  # in the order in which the paper draws probes
PAPER_SEED = 1234  # seed of repeat 0, and of all MLPs together
PAPER_PROBES = 20  # probes of each norm
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_BUMP = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
SCORED = slice(11, 17)  # positions that predict a digit of the sum
Norms = dict[tuple[str, Symbol, int], tuple[Tensor, Tensor]]
"""Norm and its standard error over probes, by block, part and layer."""


@dataclass(frozen=True)
class SweepExperiment:
    """One sweep."""

    name: str
    family: Family
    depth: int
    grid: str
    norm: Literal["none", "pre"] = "none"

    @property
    def sigmas(self) -> np.ndarray:
        """Standard deviations of the embeddings' entries."""
        return GRIDS[self.grid]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that are measured in every layer."""
        return ("W",) if self.family == "mlp" else ("W_V", "W_Q")

    @property
    def rows(self) -> list[tuple[str, Symbol, int]]:
        """Block, part and layer (counted from 0) of everything that is measured at one scale."""
        return [
            (block, part, layer) for block in self.blocks for part in PARTS for layer in range(self.depth)
        ]

    @property
    def slow(self) -> bool:
        """Return True if one scale takes long enough to be stored on its own."""
        return self.family == "softmax" and self.depth > 1

    def is_zero(self, block: str, part: str, layer: int) -> bool:
        """Return True if a part is exactly zero, because the network is linear in the block up to ReLU."""
        if part != "H_f" or self.norm == "pre":
            return False
        last = layer == self.depth - 1
        return self.family == "mlp" or (last and (self.family == "linear" or block == "W_V"))


def _experiments() -> dict[str, SweepExperiment]:
    found = [
        SweepExperiment(f"softmax_none_ce_log_L{depth}", "softmax", depth, "log") for depth in range(1, 6)
    ]
    found += [
        SweepExperiment("softmax_none_ce_linear_L1", "softmax", 1, "linear"),
        SweepExperiment("softmax_none_ce_linear_short_L1", "softmax", 1, "linear_short"),
        SweepExperiment("softmax_pre_ce_log_L1", "softmax", 1, "log", norm="pre"),
    ]
    found += [
        SweepExperiment(f"linattn_none_mse_log_short_L{depth}", "linear", depth, "log_short")
        for depth in range(1, 4)
    ]
    found += [SweepExperiment(f"mlp_L{depth}", "mlp", depth, "log") for depth in range(1, 6)]
    return {experiment.name: experiment for experiment in found}


EXPERIMENTS = _experiments()


def chosen(patterns: Sequence[str]) -> list[SweepExperiment]:
    """Experiments that match the globs, in the table's order; a glob without a match is an error."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in EXPERIMENTS):
            raise UsageError(
                f"experiments: expected glob patterns of sweep names, got {pattern!r}",
                hint=near_misses(pattern, list(EXPERIMENTS)),
            )
    return [e for name, e in EXPERIMENTS.items() if any(fnmatchcase(name, glob) for glob in patterns)]


@dataclass(frozen=True)
class RandomSource:
    """Random numbers of one repeat."""

    experiment: SweepExperiment
    repeat: int
    seed: int
    replay: bool
    redraw: bool
    device: str

    def weights(self) -> dict[str, Tensor]:
        """Draw all weights except the embeddings in float32; return them in float64 by the zoo's names."""
        if self.experiment.family == "mlp":
            found = self._mlp_weights()
        else:
            module = Transformer(_zoo_config(self.experiment, self._model_seed()))
            found = {name: p.detach().double() for name, p in module.named_parameters()}
        return {name: W.to(self.device) for name, W in found.items() if name not in ("E", "P")}

    def embeddings(self, index: int) -> tuple[Tensor, Tensor]:
        """Draw E (12, d) and P (18, d) at scale number `index`; an MLP has no positions, so P is zero."""
        shapes = (VOCABULARY, WIDTH), (CONTEXT, WIDTH)
        sigma = float(self.experiment.sigmas[index])
        if self.experiment.family == "mlp":
            P = torch.zeros(shapes[1], dtype=torch.float64)
            E = self._mlp_embedding(index, sigma) if self.replay else self._own(0, shapes[0], index, sigma)
        elif self.replay:
            key = PAPER_SEED + self.repeat
            E, P = (cuda_normal(s, sigma, seed=key, call=2 * index + i) for i, s in enumerate(shapes))
        else:
            E, P = (self._own(i, shape, index, sigma) for i, shape in enumerate(shapes))
        return E.to(self.device), P.to(self.device)

    def probes(self, index: int, layer: int, block: str, part: Symbol, num: int) -> Tensor:
        """Draw probes ±1 of a block, (num, d, d); without replay, equal for all parts and scales."""
        if not self.replay:
            which = (self.repeat, _PROBES, layer, int(block == "W_V"))
            return _own_probes(_child(self.seed, *which), num, self.device)
        depth, size = self.experiment.depth, WIDTH * WIDTH
        place = ((index * depth + layer) * 2 + int(block == "W_V")) * 3 + _STREAM_PARTS.index(part)
        total = len(self.experiment.sigmas) * depth * 6 * PAPER_PROBES
        drawn = rademacher(self.repeat, place * PAPER_PROBES, num, size, total=total)
        return drawn.reshape(num, WIDTH, WIDTH).to(self.device)

    def _model_seed(self) -> int:
        return PAPER_SEED + self.repeat if self.replay else _child(self.seed, self.repeat, _WEIGHTS)

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
            f"W_{i + 1}": cuda_uniform((size, WIDTH), bound, seed=PAPER_SEED, call=first + i).T
            for i, size in enumerate(sizes)
        }

    def _mlp_embedding(self, index: int, sigma: float) -> Tensor:
        call = self._mlp_call() + 1 + self.experiment.depth + index
        return cuda_normal((VOCABULARY, WIDTH), sigma, seed=PAPER_SEED, call=call)

    def _mlp_call(self) -> int:
        """Number of calls of the GPU's generator before this repeat; all MLPs share one seed.

        A repeat makes one call for its embedding, one per layer and one per scale.
        """
        scales = len(self.experiment.sigmas)
        before = sum(
            REPEATS * (1 + e.depth + scales)
            for e in EXPERIMENTS.values()
            if e.family == "mlp" and e.depth < self.experiment.depth
        )
        return before + self.repeat * (1 + self.experiment.depth + scales)


def sweep_tokens() -> Tensor:
    """Tokens of the batch of all sweeps: (64, 18)."""
    tokens = next(iter(addition())).inputs
    assert isinstance(tokens, Tensor)
    return tokens


def _zoo_config(experiment: SweepExperiment, seed: int) -> TransformerConfig:
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


def philox(seed: int, call: int, num: int) -> np.ndarray:
    """Philox random numbers: the four 32-bit words of elements 0 … num − 1 in one call, (4, num) as uint64
    below 2³².

    Ten rounds of (c₀, c₁, c₂, c₃) ← (hi(M₁ c₂) ⊕ c₁ ⊕ k₀, lo(M₁ c₂), hi(M₀ c₀) ⊕ c₃ ⊕ k₁, lo(M₀ c₀)).
    """
    c0 = np.full(num, call & 0xFFFFFFFF, dtype=np.uint64)
    c1 = np.full(num, call >> 32, dtype=np.uint64)
    c2 = np.arange(num, dtype=np.uint64)
    c3 = np.zeros(num, dtype=np.uint64)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        one, two = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        k0, k1 = np.uint64(key[0]), np.uint64(key[1])
        c0, c1, c2, c3 = (two >> _HALF) ^ c1 ^ k0, two & _LOW, (one >> _HALF) ^ c3 ^ k1, one & _LOW
        key = [(k + b) & 0xFFFFFFFF for k, b in zip(key, _BUMP, strict=True)]
    return np.stack([c0, c1, c2, c3])


def cuda_normal(shape: tuple[int, ...], std: float, *, seed: int, call: int) -> Tensor:
    """Reproduce `normal_(0, std)` on the GPU, in float64 with the digits of float32."""
    words = philox(seed, call, math.prod(shape)).astype(np.float32)
    u1, u2 = words[0] * np.float32(2**-32) + np.float32(2**-33), words[1]
    turn = u2 * np.float32(2**-32 * 2 * math.pi) + np.float32(2**-33 * 2 * math.pi)
    drawn = np.sin(turn) * np.sqrt(np.float32(-2) * np.log(u1))
    return torch.from_numpy((drawn * np.float32(std)).astype(np.float64)).reshape(shape)


def cuda_uniform(shape: tuple[int, ...], bound: float, *, seed: int, call: int) -> Tensor:
    """Reproduce `uniform_(−bound, bound)` on the GPU, in float64 with the digits of float32."""
    u = philox(seed, call, math.prod(shape))[0].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    u = np.where(u == 1, np.float32(0), u)
    low, high = np.float32(-bound), np.float32(bound)
    return torch.from_numpy((u * (high - low) + low).astype(np.float64)).reshape(shape)


def rademacher(repeat: int, first: int, num: int, size: int, *, total: int) -> Tensor:
    """Return probes `first, …, first + num − 1` of a repeat's stream, ±1 in float64: (num, size).

    The paper draws `total` probes of `size` numbers one after the other.
    """
    bits = _bits(PAPER_SEED + repeat, total, size)[first : first + num]
    signs = np.unpackbits(bits, axis=1, count=size).astype(np.float64) * 2 - 1
    return torch.from_numpy(signs)


@lru_cache(maxsize=1)
def _bits(seed: int, total: int, size: int) -> np.ndarray:
    """Draw all probes of a repeat as packed bits, (total, size / 8), a few MB."""
    source = np.random.RandomState(seed)  # binomial(1, 1/2) uses one uniform number, compared with one half
    return np.stack([np.packbits(source.random_sample(size) > 0.5) for _ in range(total)])


def measure(
    source: RandomSource, index: int, weights: dict[str, Tensor], tokens: Tensor, *, probes: int, exact: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Compute norms and standard errors at scale number `index`, in the order of the experiment's rows.

    Args:
        exact: compute the last layer in closed form; otherwise estimate it with probes, as in the paper.
    """
    experiment = source.experiment
    E, P = source.embeddings(index)
    if experiment.family == "mlp":
        found = _mlp_norms(E[tokens[:, SCORED]].flatten(0, 1), weights, experiment.depth)
    else:
        found = _transformer_norms(source, index, embed(E, P, tokens), weights, tokens, probes, exact)
    values = torch.stack([torch.stack(found[row]) for row in experiment.rows]).cpu().numpy()
    return values[:, 0], values[:, 1]


def embed(E: Tensor, P: Tensor, tokens: Tensor) -> Tensor:
    """Return the residual stream before the first layer for the tokens that affect the loss: (n, 17, d)."""
    return (E[tokens] + P[: tokens.shape[1]])[:, : SCORED.stop]


def _transformer_norms(
    source: RandomSource,
    index: int,
    x: Tensor,
    weights: dict[str, Tensor],
    tokens: Tensor,
    probes: int,
    exact: bool,
) -> Norms:
    experiment = source.experiment
    last, linear = experiment.depth - 1, experiment.family == "linear"
    task = Task(tokens, "mse" if linear else "ce", SCORED, VOCABULARY)
    if experiment.norm == "pre":
        return _last_layer(pre_norm_blocks(x, weights, task), source, index, probes, exact)
    kind, skip = ("linear", 0.0) if linear else ("softmax", 1.0)
    layers = forward(x, weights, experiment.depth, kind=kind, skip=skip, scored=SCORED)
    found = _last_layer(last_blocks(layers[-1], weights["U"], task), source, index, probes, exact)
    if last:
        behind = suffix(layers, weights["U"], task)
        for layer in range(last):
            for block in ("W_Q", "W_V"):
                found |= _inner_layer(behind, source, index, layer, block, probes)
    return found


def _last_layer(head: HeadNorms, source: RandomSource, index: int, probes: int, exact: bool) -> Norms:
    """Compute norms of the last layer, whose blocks are sums of Kronecker products."""
    last, found = source.experiment.depth - 1, Norms()
    for block in source.experiment.blocks:
        terms = head.block("V" if block == "W_V" else "Q")
        norms = terms.norms() if exact else None
        for part in PARTS:
            if norms is not None:
                value = getattr(norms, PART_OF[part])
                found[block, part, last] = value, torch.zeros_like(value)
            else:
                V = source.probes(index, last, block, part, probes)
                found[block, part, last] = estimate(terms.product(V, PART_OF[part]))
    return found


def _inner_layer(
    behind: Suffix, source: RandomSource, index: int, layer: int, block: Block, probes: int
) -> Norms:
    if source.replay:  # each part has its own probes
        products = {
            part: behind.products(
                layer, block, source.probes(index, layer, block, part, probes), [PART_OF[part]]
            )[0]
            for part in PARTS
        }
    else:
        V = source.probes(index, layer, block, "H", probes)
        outer, functional = behind.products(layer, block, V, ["outer", "functional"])
        products = {"H_o": outer, "H_f": functional, "H": outer + functional}
    return {(block, part, layer): estimate(products[part]) for part in PARTS}


def estimate(products: Tensor) -> tuple[Tensor, Tensor]:
    """Return √ mean ‖A v‖² over probes, (k, d, d), and its standard error by the delta method."""
    squares = products.square().sum((1, 2))
    norm = squares.mean().sqrt()
    if len(squares) == 1:
        return norm, torch.full_like(norm, math.nan)
    spread = squares.std() / math.sqrt(len(squares))
    return norm, torch.where(norm > 0, spread / (2 * norm).clamp_min(torch.finfo(norm.dtype).tiny), 0.0)


def _mlp_norms(x: Tensor, weights: dict[str, Tensor], depth: int) -> Norms:
    """Compute ‖H_l‖ = 2 ‖X_lᵀX_l‖ ‖C_lᵀC_l‖ of a linear MLP; H_f = 0."""
    behind = [torch.eye(weights[f"W_{depth}"].shape[1]).to(x)]
    for layer in range(depth, 1, -1):
        behind.append(weights[f"W_{layer}"] @ behind[-1])
    found, zero = Norms(), x.new_zeros(())
    for layer, C in enumerate(reversed(behind)):
        norm = 2 * torch.linalg.norm(x.T @ x) * torch.linalg.norm(C.T @ C)
        found |= {("W", part, layer): (zero if part == "H_f" else norm, zero) for part in PARTS}
        x = x @ weights[f"W_{layer + 1}"]
    return found
