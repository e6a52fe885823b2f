"""Task, embeddings, small networks and norms that all questions share.

The task is the paper's addition with two-digit numbers: 9 tokens; the three digits of the sum are
predicted. Every network reads X = σ X₀, X₀ = E[token] + P[position] with standard normal E and P of width 4
(fixed, not parameters), and returns 12 logits at each position. Networks other than Transformers have the
same size, no biases, and are causal. They see earlier tokens in different ways: the last six tokens
concatenated (MLP, gated MLP), convolutions, a recurrent state, or a triangular matrix over positions (mixer).
Weights are N(0, 1/rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.config import setting
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.core.tensors import IGNORED
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks.algorithmic import Targets, addition
from curvescope.losses import Loss
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import GGN, FunctionalHessian
from curvescope.papers.common import FigureConfig
from curvescope.problem import Problem

DIGITS, TOKENS, CLASSES, WIDTH = 2, 9, 12, 4
BASE: dict[str, Any] = {
    "n_layers": 1, "d_model": WIDTH, "n_heads": 1, "d_ff": 5, "n_ctx": TOKENS, "norm": "none",
    "activation": "relu", "inputs": "continuous", "outputs": "regression", "n_out": CLASSES,
    "positions": "none", "init": "scaled", "bias_qkv": False, "bias_o": False, "bias_ff": False,
}  # fmt: skip
SMALL = (3e-4, 1e-3, 3e-3)  # scales in the fit of exponents for small σ
DATA = (
    "addition of two two-digit numbers (9 tokens, cross-entropy of the three digits of the sum, "
    "{sequences} sequences), inputs σ(E + P) with standard normal E and P of width 4"
)
WINDOW = 6  # tokens that an MLP sees: both numbers and the signs, at the first predicting position
PARTS = ("gradient", "H_o", "H_f", "H")
Make = Callable[[int], nn.Module]
MakeProblem = Callable[[int, float], Problem]


@dataclass(frozen=True)
class Config(FigureConfig):
    """Number of networks. Quick: 5 seeds and 3 scales per decade, about two minutes; full: 20 and 6."""

    seeds: int = setting(0, "networks of each kind; 0: the default of the profile, 5 or 20", least=0)
    sequences: int = setting(8, "sums on which curvature is measured", least=1)
    scales: int = setting(
        0, "number of scales over six decades; 0: the default of the profile, 19 or 37", least=0
    )
    steps: int = setting(400, "training steps in the comparison of one query-key matrix with two", least=1)

    @property
    def count(self) -> int:
        """Number of seeds of each kind."""
        return self.seeds or (5 if self.profile == "quick" else 20)

    @property
    def decades(self) -> np.ndarray:
        """Scales over six decades of σ."""
        return np.logspace(-4, 2, self.scales or (19 if self.profile == "quick" else 37))


def transformer(seed: int, **changes: Any) -> nn.Module:
    """Return the zoo's Transformer with 152 parameters, with optional changes, in float64."""
    return Transformer(TransformerConfig(**{**BASE, **changes, "seed": seed})).double()


def addition_batch(num: int, targets: Targets = "next") -> Batch:
    """The sums."""
    return next(iter(addition(num_sequences=num, digits=DIGITS, targets=targets)))


def embedded(batch: Batch, seed: int) -> Tensor:
    """Return X₀ = E[token] + P[position], (n, 9, 4), the same for every network of a seed."""
    source = generator(seed, 1)
    E, P = (torch.randn(rows, WIDTH, generator=source, dtype=torch.float64) for rows in (CLASSES, TOKENS))
    assert isinstance(batch.inputs, Tensor)
    return E[batch.inputs] + P


def problem(
    module: nn.Module, X: Tensor, targets: Any, weights: Tensor | None = None,
    loss: str | Loss = "cross_entropy",
) -> Problem:  # fmt: skip
    """Return the problem of a network on these inputs and targets."""
    return Problem(load(module), Batches([Batch(X, targets, weights)]), loss)


def draw(seed: int) -> Callable[..., nn.Parameter]:
    """Return a function that draws one weight after the other, of given shapes."""
    source = generator(seed, 2)

    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=source, dtype=torch.float64) / shape[0] ** 0.5)

    return weight


def windows(X: Tensor, width: int) -> Tensor:
    """Concatenate the last `width` tokens at every position, zeros before the first: (n, T, width · d)."""
    padded = nn.functional.pad(X, (0, 0, width - 1, 0))
    return padded.unfold(1, width, 1).flatten(2)


@final
class Perceptron(nn.Module):
    """MLP relu(relu(x W_1) W_2) U of the last six tokens x."""

    def __init__(self, seed: int, hidden: int = 4):
        super().__init__()
        weight = draw(seed)
        self.W_1, self.W_2 = weight(WINDOW * WIDTH, hidden), weight(hidden, hidden)
        self.U = weight(hidden, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        return (windows(X, WINDOW) @ self.W_1).relu().matmul(self.W_2).relu() @ self.U


@final
class GatedPerceptron(nn.Module):
    """Gated MLP (x_t + (x W_g ∘ x W_u) W_2) U of the last six tokens x, with a skip."""

    def __init__(self, seed: int, hidden: int = 2):
        super().__init__()
        weight = draw(seed)
        self.W_g, self.W_u = weight(WINDOW * WIDTH, hidden), weight(WINDOW * WIDTH, hidden)
        self.W_2, self.U = weight(hidden, WIDTH), weight(WIDTH, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        x = windows(X, WINDOW)
        return (X + ((x @ self.W_g) * (x @ self.W_u)) @ self.W_2) @ self.U


@final
class Convolutions(nn.Module):
    """Two causal convolutions over three tokens each, with relu."""

    def __init__(self, seed: int, channels: int = 4):
        super().__init__()
        weight = draw(seed)
        self.C_1, self.C_2 = weight(3 * WIDTH, channels), weight(3 * channels, channels)
        self.U = weight(channels, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        x = (windows(X, 3) @ self.C_1).relu()
        return (windows(x, 3) @ self.C_2).relu() @ self.U


@final
class Mixer(nn.Module):
    """MLP-mixer: x + M_2 gelu(M_1 x) over positions, then x + gelu(x W_1) W_2 over features, then U.

    M_1 and M_2 are lower triangular, with 45 entries each.
    """

    def __init__(self, seed: int, hidden: int = 2):
        super().__init__()
        weight = draw(seed)
        entries = TOKENS * (TOKENS + 1) // 2
        self.M_1, self.M_2 = weight(entries), weight(entries)
        self.W_1, self.W_2 = weight(WIDTH, hidden), weight(hidden, WIDTH)
        self.U = weight(WIDTH, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        x = X + _triangular(self.M_2) @ nn.functional.gelu(_triangular(self.M_1) @ X)
        x = x + nn.functional.gelu(x @ self.W_1) @ self.W_2
        return x @ self.U


@final
class Recurrent(nn.Module):
    """Recurrent network h_t = tanh(x_t W_x + h_{t−1} W_h) with logits h_t U."""

    def __init__(self, seed: int, hidden: int = 7):
        super().__init__()
        weight = draw(seed)
        self.W_x, self.W_h = weight(WIDTH, hidden), weight(hidden, hidden)
        self.U = weight(hidden, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        states = [(X[:, 0] @ self.W_x).tanh()]
        for t in range(1, X.shape[1]):
            states.append((X[:, t] @ self.W_x + states[-1] @ self.W_h).tanh())
        return torch.stack(states, dim=1) @ self.U


def _triangular(entries: Tensor) -> Tensor:
    """Triangular matrix (9, 9) that is zero above the diagonal."""
    rows, columns = torch.tril_indices(TOKENS, TOKENS)
    return entries.new_zeros(TOKENS, TOKENS).index_put((rows, columns), entries)


ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "Transformer": transformer,
    "MLP": Perceptron,
    "convolutional net": Convolutions,
    "MLP-mixer": Mixer,
    "RNN": Recurrent,
    "gated MLP": GatedPerceptron,
}
"""Networks with 144 to 161 parameters by name; each function makes one from a seed."""


@dataclass(frozen=True)
class NormSweep(Result):
    """Frobenius norms of diagonal blocks, and gradients of the loss at the network's outputs F."""

    blocks: list[str]  # b of them
    sizes: list[int]  # number of parameters of each
    sigma: np.ndarray  # (S,)
    norms: np.ndarray  # (seeds, S, 4, b) in the order of PARTS
    slope: np.ndarray  # (seeds, S) root mean square of ‖∂ℓ/∂F‖ over the terms that count

    def curve(self, part: str, block: str) -> np.ndarray:
        """Norms of a block: (seeds, S)."""
        return self.norms[:, :, PARTS.index(part), self.blocks.index(block)]


def sweep(
    make: Make, sigma: Sequence[float] | np.ndarray, *blocks: str, seeds: int, sequences: int
) -> NormSweep:
    """Measure a network on the addition task with cross-entropy; `blocks` are glob patterns."""
    batch = addition_batch(sequences)

    def at(seed: int, scale: float) -> Problem:
        return problem(make(seed), scale * embedded(batch, seed), batch.targets)

    return sweep_of(at, sigma, *blocks, seeds=seeds)


def sweep_of(at: MakeProblem, sigma: Sequence[float] | np.ndarray, *blocks: str, seeds: int) -> NormSweep:
    """Measure the problems at(seed, σ)."""
    norms, slope, first = [], [], at(0, float(sigma[0]))
    for seed in range(seeds):
        found = [at(seed, float(scale)) for scale in sigma]
        norms.append([block_norms(one, *blocks) for one in found])
        slope.append([loss_slope(one) for one in found])
    space = first.space(*blocks)
    return NormSweep(
        [block.name for block in space], [block.size for block in space], np.asarray(sigma, dtype=float),
        np.array(norms), np.array(slope),
    )  # fmt: skip


def block_norms(problem: Problem, *blocks: str) -> np.ndarray:
    """Exact norms of the blocks of gradient, H_o, H_f and H = H_o + H_f, from dense matrices: (4, b)."""
    space = problem.space(*blocks).in_blocks()
    operators = [kind(problem, *blocks, engine="autograd").in_blocks() for kind in (GGN, FunctionalHessian)]
    outer, functional = (op.to_dense() for op in operators)
    gradient = problem.space(*blocks).convert(problem.gradient(*blocks), space)
    whole = outer + functional
    cuts = [space.slices[block.name] for block in space]
    rows = [[float(gradient[cut].norm()) for cut in cuts]]
    rows += [[float(H[cut, cut].norm()) for cut in cuts] for H in (outer, functional, whole)]
    return np.array(rows)


def loss_slope(problem: Problem) -> float:
    """Root mean square of ‖∂ℓ/∂F‖ of a term over the positions that count.

    It is 2(F − Y) for the loss "mse_mean", and p − y for cross-entropy.
    """
    batch = next(iter(problem.placed_batches("outputs")))
    targets = batch.targets
    assert isinstance(targets, Tensor)
    with torch.no_grad():
        G = problem.loss.gradient(problem.outputs(batch), targets, batch.weights)
    counted = targets != IGNORED if batch.weights is None else batch.weights.bool()
    return float(G[counted].square().sum(-1).mean().sqrt())
