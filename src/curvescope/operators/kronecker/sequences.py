"""Which rows of a linear map belong to which sequence, found by asking for gradients of some sequences.

A row of y = a W belongs to sequence n if the loss of n depends on it. Which axis of y counts sequences is not
guessed: cotangents of the outputs are switched on for half of the sequences at a time, so that the passes at
which gradients arrive spell the number of a row's sequence in binary digits, and their complements. A row at
which none arrives, such as padding, does not count.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.seeds import generator
from curvescope.data.batches import Batch
from curvescope.engines.passes import pull
from curvescope.operators.kronecker.record import Recorded, Use
from curvescope.problem import Problem


class Rows(NamedTuple):
    """Rows of a use by sequence, (B, R): positions, and where there is one; some sequences have fewer."""

    at: Tensor
    there: Tensor

    def take(self, x: Tensor) -> Tensor:
        """(…, rows, d) to (…, B, R, d), zero where a sequence has no row."""
        found = x.index_select(-2, self.at.reshape(-1)).unflatten(-2, self.at.shape)
        return found * self.there[..., None]


class Asked(NamedTuple):
    """Rows of every use, None where they serve several sequences; and a gradient to check against."""

    rows: list[Rows | None]
    gradients: list[Tensor]  # of each use, (rows, d_out)
    leaf_gradients: dict[str, Tensor]


def ask(problem: Problem, recorded: Recorded, batch: Batch) -> Asked:
    """Send the cotangents of some sequences after the others through a recorded batch."""
    z, B = recorded.outputs, batch.num_sequences
    u = _anything(problem, z.detach(), batch)
    masks = _codes(B, z.device).to(u.dtype)
    given = masks.reshape(*masks.shape, *[1] * (z.dim() - 1)) * u
    into = [*(use.edge for use in recorded.uses), *recorded.leaves.values()]
    found = pull([z], [given], into, 1 if B == 1 else len(masks))  # pyright: ignore[reportArgumentType]
    here = [x.flatten(1, -2) if x is not None else None for x in found[: len(recorded.uses)]]
    size = 1 if B == 1 else 2  # a digit and its complement are all sequences
    leaf = dict(zip(recorded.leaves, found[len(recorded.uses) :], strict=True))
    sums = {name: g[:size].sum(0) for name, g in leaf.items() if g is not None}
    gradients = [
        torch.zeros(prod(use.lead), use.weight.shape[-1], dtype=z.dtype, device=z.device)
        if g is None
        else g[:size].sum(0)
        for use, g in zip(recorded.uses, here, strict=True)
    ]
    return Asked(_rows_of(recorded.uses, here, B), gradients, sums)


def _anything(problem: Problem, z: Tensor, batch: Batch) -> Tensor:
    """A cotangent that is zero exactly where no term counts: the loss's gradient at random outputs."""
    random = torch.randn(z.shape, generator=generator(0, 16), dtype=torch.float64).to(z)
    return problem.loss.gradient(random, batch.targets, batch.weights).detach()


def _codes(B: int, device: torch.device) -> Tensor:
    """Which sequences are switched on in which pass: (2 ⌈log₂ B⌉, B), or one pass for one sequence."""
    if B == 1:
        return torch.ones(1, 1, dtype=torch.bool, device=device)
    number = torch.arange(B, device=device)
    digits = [(number >> bit) & 1 == 1 for bit in range((B - 1).bit_length())]
    return torch.stack([mask for digit in digits for mask in (digit, ~digit)])


def _rows_of(uses: list[Use], found: list[Tensor | None], B: int) -> list[Rows | None]:
    """Rows of every use. Uses of one shape share what is known of a row: where all units of a layer are
    switched off, another layer tells."""
    reached: dict[tuple[int, ...], Tensor] = {}
    for use, g in zip(uses, found, strict=True):
        if g is not None:
            here = (g != 0).any(-1)
            reached[use.lead] = reached[use.lead] | here if use.lead in reached else here
    rows = {lead: _numbers(here, B) for lead, here in reached.items()}
    for use in uses:  # what reaches no term has no rows that count
        if use.lead not in rows:
            rows[use.lead] = _by_sequence(torch.full((prod(use.lead),), -1, device=use.given.device), B)
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
