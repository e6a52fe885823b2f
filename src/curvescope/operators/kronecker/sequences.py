"""Which rows of a linear map belong to which sequence, found by asking for gradients of some sequences.

A row of y = a W belongs to sequence n if the loss of n depends on it. Which axis of y counts sequences is not
guessed: cotangents of the outputs are switched on for half of the sequences at a time, so that the passes at
which gradients arrive spell the number of a row's sequence in binary digits, and their complements. A row at
which none arrives, such as padding, does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvescope.data.batches import Batch
from curvescope.engines.vjp import pull
from curvescope.operators.kronecker.record import Recorded, Use
from curvescope.problem import Problem

GOLDEN = 0.6180339887498949  # its multiples do not repeat, modulo 1


class Rows(NamedTuple):
    """Rows of a use by sequence, (B, R): positions, and where there is one; some sequences have fewer."""

    at: Tensor
    there: Tensor

    def take(self, x: Tensor) -> Tensor:
        """(…, rows, d) to (…, B, R, d), zero where a sequence has no row."""
        if not x.shape[-2]:  # an expert that no token came to
            return x.new_zeros(*x.shape[:-2], *self.at.shape, x.shape[-1])
        found = x.index_select(-2, self.at.reshape(-1)).unflatten(-2, self.at.shape)
        return found * self.there[..., None]


class Asked(NamedTuple):
    """Rows of every use, None where they serve several sequences; and a gradient to check against."""

    rows: list[Rows | None]
    gradients: list[Tensor]  # of each use, (rows, d_out)
    leaf_gradients: dict[str, Tensor]


def ask(problem: Problem, recorded: Recorded, batch: Batch, parameters: Iterable[str]) -> Asked:
    """Send cotangents back through a recorded batch: of all its sequences, then of some after the others.

    Args:
        problem: Whose loss it is.
        recorded: The batch's graph.
        batch: A placed one.
        parameters: Those whose gradients are wanted.
    """
    z, uses = recorded.outputs, recorded.uses
    u = _anything(problem, z.detach(), batch)
    leaves = {name: recorded.leaves[name] for name in dict.fromkeys(parameters)}
    found = _back(recorded, u, leaves.values())
    gradients, whole = _rows_first(uses, found, z), found[len(uses) :]
    masks = _codes(batch.num_sequences, z.device)
    reached = [[(g != 0).any(-1) for g in gradients]]  # one sequence is asked by now
    if len(masks):
        several = (u * mask.reshape(-1, *[1] * (z.dim() - 1)) for mask in masks)
        reached = [[(g != 0).any(-1) for g in _rows_first(uses, _back(recorded, v), z)] for v in several]
    passes = [torch.stack(own) for own in zip(*reached, strict=True)]
    sums = {name: g for name, g in zip(leaves, whole, strict=True) if g is not None}
    return Asked(_rows_of(uses, passes, batch.num_sequences), gradients, sums)


def _back(recorded: Recorded, u: Tensor, leaves: Iterable[Tensor] = ()) -> list[Tensor | None]:
    """Gradients for one cotangent, of all uses, then of the leaves."""
    into: list[Any] = [*(use.edge for use in recorded.uses), *leaves]
    found = pull([recorded.outputs], [u[None]], into, 1) if into else []
    return [None if g is None else g[0] for g in found]


def _rows_first(uses: list[Use], found: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Gradients of uses as (rows, d_out)."""
    return [
        like.new_zeros(prod(use.lead), use.weight.shape[-1]) if g is None else g.flatten(0, -2)
        for use, g in zip(uses, found, strict=False)
    ]


def _anything(problem: Problem, z: Tensor, batch: Batch) -> Tensor:
    """A cotangent that is zero exactly where no term counts: the loss's gradient at outputs of no meaning."""
    outputs = (torch.arange(z.numel(), dtype=z.dtype, device=z.device) * GOLDEN).remainder(1).reshape(z.shape)
    return problem.loss.gradient(outputs, batch.targets, batch.weights).detach()


def _codes(B: int, device: torch.device) -> Tensor:
    """Which sequences are switched on in which pass: (2 ⌈log₂ B⌉, B)."""
    number = torch.arange(B, device=device)
    digits = [(number >> bit) & 1 == 1 for bit in range((B - 1).bit_length())]
    return torch.stack([mask for digit in digits for mask in (digit, ~digit)]) if digits else number[:0, None]


def _rows_of(uses: list[Use], reached: list[Tensor], B: int) -> list[Rows | None]:
    """Rows of every use, from the passes (k, rows) that reached them.

    Uses of one shape share what is known of a row: where a layer's units are all switched off, another tells.
    """
    together: dict[tuple[int, ...], Tensor] = {}
    for use, here in zip(uses, reached, strict=True):
        together[use.lead] = together[use.lead] | here if use.lead in together else here
    rows = {lead: _numbers(here, B) for lead, here in together.items()}
    return [rows[use.lead] for use in uses]


def _numbers(here: Tensor, B: int) -> Rows | None:
    """Rows by sequence from the passes (k, rows) that reached them; None where a row serves several."""
    counted = here.any(0)
    if B == 1:
        return _by_sequence(torch.where(counted, 0, -1), B)
    digit, other = here[0::2], here[1::2]
    if bool((digit & other).any()):
        return None
    place = 2 ** torch.arange(len(digit), device=here.device)
    number = (digit * place[:, None]).sum(0)
    return _by_sequence(torch.where(counted, number, -1), B)


def _by_sequence(number: Tensor, B: int) -> Rows:
    """Rows sorted by the number of their sequence, −1 for none."""
    counts = torch.bincount(number[number >= 0], minlength=B)
    R = max(int(counts.max()), 1)
    index = torch.zeros(B, R, dtype=torch.long, device=number.device)
    there = torch.arange(R, device=number.device) < counts[:, None]
    order = torch.argsort(number, stable=True)
    index[there] = order[int((number < 0).sum()) :]
    return Rows(index, there)
