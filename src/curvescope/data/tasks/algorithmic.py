"""Tasks with one right answer: addition, also modulo p, sorting, copying a word, and induction.

Addition goes digit by digit, as Ormaniec, Dangel and Singh (ICLR 2025) train and measure on it.
A sequence is x₁…x_D + y₁…y_D = z₀…z_D with the most significant digit first: 3D + 3 tokens, 18 for D = 5.
Ids: the digits 0–9, "+" is 10, "=" is 11.

Construction: one torch generator with `seed`; x and then y are drawn as randint(0, 10, (draw_size, D)), draw
after draw (`draw_size=None`: all sequences in one draw; the last draw has the remaining ones). With
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

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.tasks.checks import check_choice, check_counts, check_not_negative

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
    """Sums of two numbers of D = `digits` digits, drawn as described at the top of this file.

    The full sequence is the input, (n, 3D + 3). The D + 1 positions 2D + 1 … 3D + 1 count, from "=" to the
    last but one: each predicts the digit of z that follows.

    Targets: "next" are integers, −100 at positions that do not count. "onehot_next" and "onehot_current" are
    real, (n, 3D + 3, 12), with weights (n, 3D + 3) that are 1 where a position counts, for the loss
    "mse_mean"; the published squared error used the current token, and was a sum: 12 (D + 1) n times this
    mean.
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
    """Return x and y; with some probability a fifth of their columns sums to nine."""
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


def modular_addition(
    *,
    p: int = 23,
    fraction: float = 1.0,
    held_out: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """Pairs (a, b) of numbers below p as `a b =`; the model must predict (a + b) mod p at "=".

    Ids: the numbers 0 … p − 1, "=" is p; p + 1 in all. Inputs are (n, 3), and of the targets only the last
    counts. Construction: of the pairs in lexicographic order a randperm with `seed` chooses
    round(fraction · p²), which keep that order. `held_out=True` gives exactly the pairs not chosen.
    """
    check_counts(2, p=p)
    check_not_negative(fraction=fraction)
    num_chosen = round(fraction * p * p)
    num_pairs = p * p - num_chosen if held_out else num_chosen
    if fraction > 1 or num_pairs < 1:
        what = "the pairs held out" if held_out else "the pairs"
        raise UsageError(
            f"expected a fraction in [0, 1] that leaves some of {what}, got {fraction} of {p * p} pairs"
        )
    order = torch.randperm(p * p, generator=generator(seed))
    pairs = (order[num_chosen:] if held_out else order[:num_chosen]).sort().values
    a, b = pairs // p, pairs % p
    inputs = torch.stack([a, b, torch.full_like(a, p)], dim=1)
    targets = torch.full_like(inputs, IGNORED)
    targets[:, 2] = (a + b) % p
    return Batches.from_tensors(inputs, targets, batch_size=batch_size, name="modular_addition")


def sorting(
    *,
    num_sequences: int = 64,
    length: int = 6,
    vocab: int = 3,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """m = `length` letters of {0, …, vocab − 1}, then the same letters in ascending order.

    Construction: letters are uniform, one randint with `seed`. The input is the first 2m − 1 of the 2m
    tokens, (n, 2m − 1), and position m − 1 + i predicts the i-th sorted letter (i from 0): the last unsorted
    letter and what follows it count. The defaults have the layout of minGPT's sorting demonstration, which
    draws words with few different letters more often.
    """
    check_counts(num_sequences=num_sequences, length=length, vocab=vocab)
    letters = torch.randint(0, vocab, (num_sequences, length), generator=generator(seed))
    tokens = torch.cat([letters, letters.sort(dim=1).values], dim=1)
    targets = tokens[:, 1:].clone()
    targets[:, : length - 1] = IGNORED
    return Batches.from_tensors(tokens[:, :-1], targets, batch_size=batch_size, name="sorting")


def copy(
    *,
    num_sequences: int = 64,
    length: int = 8,
    vocab: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """A word w₁ … w_m of m = `length` random letters, a separator, and the word again.

    Ids: the letters 0 … vocab − 1, the separator is `vocab`. Construction: letters are uniform, one randint
    with `seed`. The input is the first 2m of the 2m + 1 tokens, (n, 2m), and position m + i predicts w_{i+1}:
    the separator and what follows it count, the first copy does not.
    """
    check_counts(num_sequences=num_sequences, length=length, vocab=vocab)
    word = torch.randint(0, vocab, (num_sequences, length), generator=generator(seed))
    tokens = torch.cat([word, torch.full_like(word[:, :1], vocab), word], dim=1)
    targets = tokens[:, 1:].clone()
    targets[:, :length] = IGNORED
    return Batches.from_tensors(tokens[:, :-1], targets, batch_size=batch_size, name="copy")


def induction(
    *,
    num_sequences: int = 64,
    length: int = 16,
    vocab: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """Random letters … A B … A; the model must predict B after the second A.

    Ids: the letters 0 … vocab − 1. Construction, from a generator with `seed`: A is uniform; the position of
    the first A is uniform among 0 … length − 3; the last letter is A; all other letters are uniform among
    those other than A. So A occurs exactly twice, B ≠ A is the letter after the first, and only the last
    position counts. Inputs and targets are (n, length).
    """
    check_counts(num_sequences=num_sequences)
    check_counts(3, length=length)
    check_counts(2, vocab=vocab)
    source = generator(seed)
    A = torch.randint(0, vocab, (num_sequences, 1), generator=source)
    place = torch.randint(0, length - 2, (num_sequences, 1), generator=source)
    others = torch.randint(0, vocab - 1, (num_sequences, length), generator=source)
    inputs = others + (others >= A)  # the letters other than A, in order
    inputs = inputs.scatter(1, place, A)
    inputs[:, -1:] = A
    targets = torch.full_like(inputs, IGNORED)
    targets[:, -1:] = inputs.gather(1, place + 1)
    return Batches.from_tensors(inputs, targets, batch_size=batch_size, name="induction")
