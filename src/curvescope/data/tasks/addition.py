"""Addition digit by digit, as Ormaniec, Dangel and Singh (ICLR 2025) train and measure on it.

A sequence is x₁…x_D + y₁…y_D = z₀…z_D with the most significant digit first: 3D + 3 tokens, 18 for D = 5.
Ids: the digits 0–9, "+" is 10, "=" is 11.

Construction: one torch generator with `seed`; x and then y are drawn as randint(0, 10, (draw_size, D)), draw
after draw (`draw_size=None`: all sequences in one draw; the last draw is what is left). With
`sum_to_nine="coin"` Python's `random.Random(seed)` decides after each draw: where randint(1, 5) = 1, a fifth
of the digit columns (the first ⌊0.2 · draw_size · D⌋ of a randperm of the same torch generator) are made to
sum to nine, by overwriting x where a further randint(1, 2) = 1, and else y. The defaults give the batch of
the published sweeps; `draw_size=8, batch_size=8, sum_to_nine="coin"` the 8 batches of the histograms.
"""

from __future__ import annotations

import random
from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.tasks.checks import check_choice, check_counts

PLUS, EQUALS, VOCAB_SIZE = 10, 11, 12

Branch = Literal["never", "coin"]
Targets = Literal["next", "onehot_next", "onehot_current"]


def addition(
    *,
    num_sequences: int = 64,
    digits: int = 5,
    seed: int = 1234,
    batch_size: int | None = None,
    sum_to_nine: Branch = "never",
    draw_size: int | None = None,
    targets: Targets = "next",
) -> Batches:
    """Sums of two numbers of D = `digits` digits; how they are drawn stands at the top of this file.

    The whole sequence is the input, (n, 3D + 3). What counts are the D + 1 positions 2D + 1 … 3D + 1, from
    "=" to the last but one: each predicts the digit of z that follows.

    Targets: "next" are integers with −100 where nothing counts. "onehot_next" and "onehot_current" are real,
    (n, 3D + 3, 12), with weights (n, 3D + 3) that are 1 where a position counts, for the loss "mse_mean"; the
    published squared error used the current token, and was a sum: 12 (D + 1) n times this mean.
    """
    draw_size = num_sequences if draw_size is None else draw_size
    check_counts(num_sequences=num_sequences, digits=digits, draw_size=draw_size)
    check_choice("sum_to_nine", sum_to_nine, get_args(Branch))
    check_choice("targets", targets, get_args(Targets))
    source, coins = generator(seed), random.Random(seed)
    drawn = []
    for start in range(0, num_sequences, draw_size):
        shape = (min(draw_size, num_sequences - start), digits)
        x, y = (torch.randint(0, 10, shape, generator=source) for _ in range(2))
        drawn.append(_sequences(*(_force_nines(x, y, source, coins) if sum_to_nine == "coin" else (x, y))))
    tokens = torch.cat(drawn)
    return Batches.from_tensors(
        tokens, *_targets(tokens, digits, targets), batch_size=batch_size, name="addition"
    )


def _force_nines(
    x: Tensor, y: Tensor, source: torch.Generator, coins: random.Random
) -> tuple[Tensor, Tensor]:
    """x and y, perhaps with a fifth of their columns made to sum to nine."""
    if coins.randint(1, 5) != 1:
        return x, y
    chosen = torch.randperm(x.numel(), generator=source)[: int(0.2 * x.numel())]
    forced = torch.zeros(x.numel(), dtype=torch.bool).index_fill(0, chosen, True).reshape(x.shape)
    if coins.randint(1, 2) == 1:
        return torch.where(forced, 9 - y, x), y
    return x, torch.where(forced, 9 - x, y)


def _sequences(x: Tensor, y: Tensor) -> Tensor:
    """x + y = z as ids, (n, 3D + 3); the carry runs from the last column to the first."""
    carry = torch.zeros_like(x[:, 0])
    z = []
    for column in reversed(range(x.shape[1])):
        total = x[:, column] + y[:, column] + carry
        z.append(total % 10)
        carry = total // 10
    z.append(carry)
    plus, equals = torch.full_like(x[:, :1], PLUS), torch.full_like(x[:, :1], EQUALS)
    return torch.cat([x, plus, y, equals, torch.stack(z[::-1], dim=1)], dim=1)


def _targets(tokens: Tensor, digits: int, kind: Targets) -> tuple[Tensor, Tensor | None]:
    """Targets and weights."""
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    counted[:, 2 * digits + 1 : -1] = True
    following = tokens.roll(-1, dims=1)  # the last entry wraps around; it does not count
    if kind == "next":
        return following.masked_fill(~counted, IGNORED), None
    shown = following if kind == "onehot_next" else tokens
    return torch.nn.functional.one_hot(shown, VOCAB_SIZE).double() * counted[..., None], counted.double()
