"""How well the GGN gives λ_max: attention beside networks without it, of as many parameters.

Targets are outputs plus ρ times normal numbers, so that the loss is ρ² in expectation for every network;
weights of n rows have the standard deviation scale/√n, tokens 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.studies.exact_spectra.dense import both_parts, eigenvalues
from curvescope.studies.exact_spectra.intervals import Median, median, median_difference
from curvescope.studies.exact_spectra.small_models import attend, relu_network, squared_error

if TYPE_CHECKING:
    import pandas as pd

NUM_TOKENS, WIDTH = 8, 4
ATTENTION, MLP = "attention", "MLP"
SCALES = (0.3, 1.0, 3.0)
RESIDUALS = (0.1, 1.0, 10.0)


class Network(NamedTuple):
    """Outputs (R, N) of weights θ (R, n) and tokens (R, L, d); `rows` scale each weight."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    outputs: Callable[[Tensor, Tensor], Tensor]
    width: int = WIDTH

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)


def head(theta: Tensor, X: Tensor, *, d: int = WIDTH) -> Tensor:
    """One softmax head with d_K = d_V = d: (R, L, d)."""
    W_Q, W_K, W_V = _matrices(theta, ((d, d),) * 3)
    scores = X @ W_Q @ (X @ W_K).mT / d**0.5
    return torch.softmax(scores, dim=2) @ X @ W_V


def feed_forward(theta: Tensor, X: Tensor, *, hidden: int, d: int = WIDTH) -> Tensor:
    """relu(X W_1) W_2: (R, L, d)."""
    W_1, W_2 = _matrices(theta, ((d, hidden), (hidden, d)))
    return torch.relu(X @ W_1) @ W_2


def block(theta: Tensor, X: Tensor, *, hidden: int) -> Tensor:
    """A head, then a feed-forward layer, each with its skip connection: (R, L, d)."""
    cut = 3 * WIDTH**2
    X = X + head(theta[:, :cut], X)
    return X + feed_forward(theta[:, cut:], X, hidden=hidden)


def _pair(hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((WIDTH, hidden), (hidden, WIDTH))


SQUARES = ((WIDTH, WIDTH),) * 3
MATCHES: dict[str, tuple[Network, Network]] = {
    "scalars": (
        Network(ATTENTION, ((1, 8), (1, 8), (1,)), lambda theta, X: attend(theta, X[:, :, 0])[:, :, None], 1),
        Network(MLP, ((1, 8), (8,), (1,)), lambda theta, X: relu_network(theta, X[:, :, 0])[:, :, None], 1),
    ),
    "width 4": (Network(ATTENTION, SQUARES, head), Network(MLP, _pair(6), partial(feed_forward, hidden=6))),
    "block": (
        Network(ATTENTION, SQUARES + _pair(6), partial(block, hidden=6)),
        Network(MLP, _pair(12), partial(feed_forward, hidden=12)),
    ),
}


@dataclass(frozen=True)
class Gaps(Result):
    """Columns: a row is one draw. The gap is |λ_max(H_o) − λ_max(H)| / |λ_max(H)|."""

    match: list[str]  # networks that are compared with each other
    kind: list[str]  # attention or MLP
    num_parameters: np.ndarray
    scale: np.ndarray  # of the weights
    residual: np.ndarray  # ρ
    draw: np.ndarray
    lambda_max: np.ndarray
    ggn_lambda_max: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """Relative error of λ_max if the GGN is taken for the Hessian."""
        return np.abs(self.ggn_lambda_max - self.lambda_max) / np.abs(self.lambda_max)

    def chosen(self, match: str, kind: str, scale: float, residual: float) -> np.ndarray:
        """Gaps of all draws of one network in one setting."""
        rows = (np.array(self.match) == match) & (np.array(self.kind) == kind)
        return self.gap[rows & (self.scale == scale) & (self.residual == residual)]

    def differences(self) -> dict[tuple[str, float, float], tuple[Median, Median, Median]]:
        """For each match, scale and residual: gap of attention, of the MLP, and their difference."""
        found = {}
        for match in dict.fromkeys(self.match):
            for scale in np.unique(self.scale):
                for residual in np.unique(self.residual):
                    one, other = (self.chosen(match, kind, scale, residual) for kind in (ATTENTION, MLP))
                    both = median(one), median(other), median_difference(one, other)
                    found[match, float(scale), float(residual)] = both
        return found

    def to_frame(self) -> pd.DataFrame:
        """One row per match, scale and residual: medians over draws and their intervals."""
        import pandas as pd

        counts = dict(zip(self.match, self.num_parameters, strict=True))
        rows = []
        for (match, scale, residual), found in self.differences().items():
            row = {"match": match, "num_parameters": counts[match], "scale": scale, "residual": residual}
            for name, one in zip((ATTENTION, MLP, "difference"), found, strict=True):
                row |= {f"{name}_gap": one.value, f"{name}_low": one.low, f"{name}_high": one.high}
            rows.append(row)
        return pd.DataFrame(rows)


def measure(match: str, scale: float, residual: float, *, num_draws: int, seed: int) -> Gaps:
    """All draws of both networks of a match."""
    return joined([_draws(match, network, scale, residual, num_draws, seed) for network in MATCHES[match]])


def measure_all(match: str, *, num_draws: int, seed: int) -> Gaps:
    """A match over all scales and residuals."""
    return joined(
        [
            measure(match, scale, residual, num_draws=num_draws, seed=seed)
            for scale in SCALES
            for residual in RESIDUALS
        ]
    )


def joined(parts: list[Gaps]) -> Gaps:
    """All rows, in order."""
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Gaps)}
    return Gaps(
        match=[one for part in columns.pop("match") for one in part],
        kind=[one for part in columns.pop("kind") for one in part],
        **{name: np.concatenate(each) for name, each in columns.items()},
    )


def _draws(match: str, network: Network, scale: float, residual: float, num_draws: int, seed: int) -> Gaps:
    source = generator(seed, 3, [ATTENTION, MLP].index(network.kind))
    X = _normal(source, num_draws, NUM_TOKENS, network.width)
    parts = [_normal(source, num_draws, int(np.prod(s))) / s[0] ** 0.5 for s in network.shapes]
    theta = scale * torch.cat(parts, dim=1)

    def outputs(theta: Tensor) -> Tensor:
        return network.outputs(theta, X).flatten(1)

    f = outputs(theta)
    y = f + residual * _normal(source, *f.shape)
    H, G = both_parts(outputs, partial(squared_error, y=y), theta)
    return Gaps(
        match=[match] * num_draws,
        kind=[network.kind] * num_draws,
        num_parameters=np.full(num_draws, network.num_parameters),
        scale=np.full(num_draws, scale),
        residual=np.full(num_draws, residual),
        draw=np.arange(num_draws),
        lambda_max=eigenvalues(H)[:, -1].numpy(),
        ggn_lambda_max=eigenvalues(G)[:, -1].numpy(),
    )


def _matrices(theta: Tensor, shapes: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Rows of θ as matrices one after the other: (R, rows, columns) each."""
    parts = theta.split([a * b for a, b in shapes], dim=1)
    return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)
