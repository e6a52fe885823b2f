"""Addition modulo p."""

from __future__ import annotations

import torch

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.tasks.checks import check_counts, check_not_negative


def modular_addition(
    *,
    p: int = 23,
    fraction: float = 1.0,
    held_out: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """Pairs (a, b) of numbers below p as a b =, with (a + b) mod p to predict at "=".

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
