"""Numbers along a path of states: angles on the sphere, path length, turning, and what the lens reads.

Angles are in degrees. Where states are normalized before they are read, all of them are unchanged when a
state is multiplied by a positive number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEGREES = 180 / math.pi


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Degrees between unit vectors in the last axis: 2 atan2(|a − b|, |a + b|), good near 0 and 180 too."""
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) * DEGREES


def path_numbers(points: Tensor, unit: Tensor) -> dict[str, Tensor]:
    """Geometry of paths (…, N, d) on the sphere, each entry (…, N).

    `norm` |x| of the points; of the unit states `unit`: `angle_start`, `angle_end` to the first and last one,
    `cos_start`, `cos_end`; `step` from the point before (0 at the first), `length` the sum of steps so far,
    `turn` the angle between the arriving and the leaving great circle (NaN at both ends, and where a step is
    zero).
    """
    first, last = unit[..., :1, :], unit[..., -1:, :]
    step = torch.nn.functional.pad(angle(unit[..., 1:, :], unit[..., :-1, :]), (1, 0))
    return {
        "norm": points.norm(dim=-1),
        "angle_start": angle(unit, first.expand_as(unit)),
        "cos_start": (unit * first).sum(-1),
        "angle_end": angle(unit, last.expand_as(unit)),
        "cos_end": (unit * last).sum(-1),
        "step": step,
        "length": step.cumsum(-1),
        "turn": turning(unit),
    }


def turning(unit: Tensor) -> Tensor:
    """Angle by which a path of unit vectors (…, N, d) turns at each point: 0 goes straight on, 180 back."""
    here, before, after = unit[..., 1:-1, :], unit[..., :-2, :], unit[..., 2:, :]
    arriving, leaving = -_towards(here, before), _towards(here, after)
    inner = angle(arriving, leaving)  # NaN where there is no direction
    return torch.nn.functional.pad(inner, (1, 1), value=math.nan)


def target_numbers(unit: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """`angle_target` and `cos_target` (…, N) of unit states (…, N, d) to unit directions (…, d) of tokens."""
    aimed = tokens.unsqueeze(-2).expand_as(unit)
    return {"angle_target": angle(unit, aimed), "cos_target": (unit * aimed).sum(-1)}


def shares(points: Tensor, *, center: bool) -> dict[str, Tensor]:
    """How attention and feed-forward divide each block's step, from points (…, 2L + 1, d): entries (…, L).

    With the step Δ = a + m of a block (centered where the norms center): `attention_share` = ⟨a, Δ⟩ / |Δ|²,
    which with the feed-forward's sums to 1, and the lengths `attention_norm` |a| and `ff_norm` |m|.
    """
    x = points - points.mean(-1, keepdim=True) if center else points
    a, m = x[..., 1::2, :] - x[..., :-1:2, :], x[..., 2::2, :] - x[..., 1::2, :]
    whole = a + m
    return {
        "attention_share": (a * whole).sum(-1) / whole.square().sum(-1),
        "attention_norm": a.norm(dim=-1),
        "ff_norm": m.norm(dim=-1),
    }


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax in the last axis; −inf (a token is ruled out) becomes a number, so that 0 log 0 = 0."""
    return logits.clamp_min(-1e30).log_softmax(-1)


def lens_numbers(logp: Tensor, targets: Tensor, current: Tensor | None) -> dict[str, Tensor]:
    """What the lens says of a target along paths, from log-probabilities (…, N, V), each entry (…, N).

    `logp_target` log p(target); `log_rank`, the logarithm of 1 + the number of more probable tokens; `top1`
    whether that rank is 1; `gain` = log p(target) − log p(current). `targets` and `current` are (…,).
    """
    aimed = _pick(logp, targets)
    rank = 1 + (logp > aimed.unsqueeze(-1)).sum(-1, dtype=torch.int32)
    found = {"logp_target": aimed, "log_rank": rank.to(logp.dtype).log(), "top1": (rank == 1).to(logp.dtype)}
    return found if current is None else found | {"gain": aimed - _pick(logp, current)}


def distribution_numbers(logp: Tensor) -> dict[str, Tensor]:
    """`entropy` of the lens in nats, and `kl_end` = KL(p_last ‖ p_here), from log-probabilities (…, N, V)."""
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    cross = -(logp @ p[..., -1, :, None]).squeeze(-1)
    return {"entropy": entropy, "kl_end": (cross - entropy[..., -1:]).clamp_min(0)}


def _pick(logp: Tensor, ids: Tensor) -> Tensor:
    """logp[…, n, ids[…]] for every n."""
    index = ids[..., None, None].expand(*logp.shape[:-1], 1)
    return logp.gather(-1, index).squeeze(-1)


def _towards(here: Tensor, there: Tensor) -> Tensor:
    """Unit tangent at `here` of the great circle to `there`; NaN where they are the same or opposite."""
    v = there - (here * there).sum(-1, keepdim=True) * here
    size = v.norm(dim=-1, keepdim=True)
    return torch.where(size > 10 * torch.finfo(v.dtype).eps, v / size, math.nan)
