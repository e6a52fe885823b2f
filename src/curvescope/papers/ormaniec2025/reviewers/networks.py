"""Networks that are no Transformers, of its size: (n, 9, 4) to logits (n, 9, 12), causal, without biases.

Each position sees what came before it in its own way: the last six tokens side by side (MLP, gated MLP),
convolutions, a recurrent state, a triangular matrix over positions (mixer). Weights are N(0, 1/rows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from curvescope.core.seeds import generator
from curvescope.papers.ormaniec2025.reviewers.setting import CLASSES, TOKENS, WIDTH, transformer

WINDOW = 6  # tokens that an MLP sees: both numbers and the signs, at the position that predicts first


def draw(seed: int) -> Callable[..., nn.Parameter]:
    """Makes one weight after the other, of the given shapes."""
    source = generator(seed, 2)

    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=source, dtype=torch.float64) / shape[0] ** 0.5)

    return weight


def windows(X: Tensor, width: int) -> Tensor:
    """At every position the last `width` tokens side by side, zeros before the first: (n, T, width · d)."""
    padded = nn.functional.pad(X, (0, 0, width - 1, 0))
    return padded.unfold(1, width, 1).flatten(2)


@final
class Perceptron(nn.Module):
    """relu(relu(x W_1) W_2) U of the last six tokens x."""

    def __init__(self, seed: int, hidden: int = 4):
        super().__init__()
        weight = draw(seed)
        self.W_1, self.W_2 = weight(WINDOW * WIDTH, hidden), weight(hidden, hidden)
        self.U = weight(hidden, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        return (windows(X, WINDOW) @ self.W_1).relu().matmul(self.W_2).relu() @ self.U


@final
class GatedPerceptron(nn.Module):
    """(x_t + (x W_g ∘ x W_u) W_2) U: a product of two linear maps of the last six tokens x, and a skip."""

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
    """x + M_2 gelu(M_1 x) over positions, then x + gelu(x W_1) W_2 over features, then U.

    M_1 and M_2 are lower triangular, and hold 45 entries each.
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
    """h_t = tanh(x_t W_x + h_{t−1} W_h), logits h_t U."""

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
    """(9, 9), zero above the diagonal."""
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
"""Networks of 144 to 161 parameters, by name; each is made from a seed."""
