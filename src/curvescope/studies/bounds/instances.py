"""What bounds are tried on: heads, post-norm blocks and ReLU networks, random and made to be difficult.

Entries are independent normal numbers in float64. A weight of n rows has the standard deviation
weight_scale/√n, tokens have data_scale, targets 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.seeds import generator

HEAD, BLOCK, NETWORK, STACK, ROW = range(5)  # streams of random numbers
NUM_CLUSTERED = 16  # tokens of `two_clusters`


class Sizes(NamedTuple):
    """Of heads, blocks and networks."""

    tokens: int = 6
    width: int = 4
    head: int = 3  # d_K
    hidden: int = 6  # of a feed-forward layer, or a network
    classes: int = 3


class Head(NamedTuple):
    """One softmax head, d_V = d, and its target."""

    X: Tensor  # (L, d)
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor  # (d, d_K)
    W_V: Tensor  # (d, d)
    target: Tensor  # (L, d)

    @property
    def output(self) -> Tensor:
        """F = softmax(X W_Q W_Kᵀ Xᵀ/√d_K) X W_V."""
        scores = self.X @ self.W_Q @ (self.X @ self.W_K).mT / self.W_Q.shape[1] ** 0.5
        return torch.softmax(scores, 1) @ self.X @ self.W_V


class Block(NamedTuple):
    """One post-norm block with ReLU, without biases, and its target."""

    X: Tensor  # (L, d)
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor  # (d, d)
    W_1: Tensor  # (d, d_ff)
    W_2: Tensor  # (d_ff, d)
    target: Tensor  # (L, d)


class Network(NamedTuple):
    """A fully connected ReLU network at one sample."""

    x: Tensor  # (d,)
    weights: list[Tensor]
    label: Tensor  # a class


def random_head(sizes: Sizes, seed: int, *, data_scale: float = 1.0, weight_scale: float = 1.0) -> Head:
    """Everything random; the same numbers at every scale."""
    source, (L, d, d_K) = generator(seed, HEAD), sizes[:3]
    X, target = _normal(source, L, d), _normal(source, L, d)
    W_Q, W_K, W_V = (weight_scale * _normal(source, d, n) / d**0.5 for n in (d_K, d_K, d))
    return Head(data_scale * X, W_Q, W_K, W_V, target)


def keyless_head(sizes: Sizes, seed: int, *, query_scale: float) -> Head:
    """W_K = 0, and the target is the output: an exact minimum whatever the queries are."""
    head = random_head(sizes, seed)
    head = head._replace(W_K=torch.zeros_like(head.W_K), W_Q=query_scale * head.W_Q)
    return head._replace(target=head.output)


def two_clusters(*, sharpness: float) -> Head:
    """Two of 16 tokens, (±1, 1), share the attention of each other; all others and the target are zero.

    The scores between the two are sharpness²/√2, all others zero: at 0 attention is uniform.
    """
    X = torch.zeros(NUM_CLUSTERED, 2, dtype=torch.float64)
    X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    W = torch.diag(torch.tensor([0.0, sharpness], dtype=torch.float64))
    return Head(X, W, W, torch.eye(2, dtype=torch.float64), torch.zeros_like(X))


def random_block(sizes: Sizes, seed: int, *, data_scale: float = 1.0, weight_scale: float = 1.0) -> Block:
    """Everything random; the same numbers at every scale."""
    block = _block(generator(seed, BLOCK), sizes)
    W_Q, W_K, W_V, W_1, W_2 = (weight_scale * W for W in block[1:6])
    return Block(data_scale * block.X, W_Q, W_K, W_V, W_1, W_2, block.target)


def closing_block(sizes: Sizes, seed: int, *, output_scale: float) -> Block:
    """A random block whose W_2 is multiplied by a number; at 0 its feed-forward layer adds nothing."""
    block = random_block(sizes, seed)
    return block._replace(W_2=output_scale * block.W_2)


def random_row(seed: int, *, width: int) -> Tensor:
    """One row for LayerNorm: (1, width)."""
    return _normal(generator(seed, ROW, width), 1, width)


def random_stack(sizes: Sizes, seed: int, *, depth: int) -> list[Block]:
    """Blocks one after the other: tokens and target are those of the first; a deeper one has more blocks."""
    return [_block(generator(seed, STACK, layer), sizes) for layer in range(depth)]


def random_network(sizes: Sizes, seed: int, *, num_layers: int, weight_scale: float) -> Network:
    """`num_layers` matrices without biases, and a random class."""
    source = generator(seed, NETWORK, num_layers)
    widths = [sizes.width, *[sizes.hidden] * (num_layers - 1), sizes.classes]
    weights = [weight_scale * _normal(source, a, b) / a**0.5 for a, b in pairwise(widths)]
    label = torch.randint(0, sizes.classes, (), generator=source)
    return Network(_normal(source, sizes.width), weights, label)


def _block(source: torch.Generator, sizes: Sizes) -> Block:
    """At scale one."""
    L, d, d_K, d_ff, _ = sizes
    X, target = _normal(source, L, d), _normal(source, L, d)
    shapes = (d, d_K), (d, d_K), (d, d), (d, d_ff), (d_ff, d)
    W_Q, W_K, W_V, W_1, W_2 = (_normal(source, *shape) / shape[0] ** 0.5 for shape in shapes)
    return Block(X, W_Q, W_K, W_V, W_1, W_2, target)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)
