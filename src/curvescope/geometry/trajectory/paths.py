"""The paths of tokens through a model, measured in the space where they are: many tokens, or one prompt.

`trajectories` averages over a data set and sets every quantity that has a target token beside the same with
shuffled targets; `follow` keeps every token of one prompt.

Numbers along a path of states: angles on the sphere, path length, turning, and what the lens reads.

Angles are in degrees. Where states are normalized before they are read, all of them are unchanged when a
state is multiplied by a positive number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batch, Batches
from curvescope.geometry.stream import Stream, stream
from curvescope.geometry.trajectory.readout import Readout, readout
from curvescope.geometry.vocabulary.names import names_of
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model


@dataclass(frozen=True)
class Curve(Result):
    """One quantity along the depth, averaged over tokens.

    Where the quantity has a target token, `shuffled` is the same with the targets of other tokens, `excess`
    the mean of real − shuffled, token by token, and `change` the excess at the last point less that at the
    first; `falling` is the share of tokens whose own change is negative.
    """

    mean: np.ndarray  # (N,)
    stderr: np.ndarray
    shuffled: np.ndarray | None = None
    shuffled_stderr: np.ndarray | None = None
    excess: np.ndarray | None = None
    excess_stderr: np.ndarray | None = None
    change: float = np.nan
    change_stderr: float = np.nan
    falling: float = np.nan


def curve(values: np.ndarray, sequence: np.ndarray, shuffled: np.ndarray | None = None) -> Curve:
    """The curve of values (M, N) of M tokens; `sequence` (M,) numbers the sequence of each."""
    mean, stderr = average(values, sequence)
    if shuffled is None:
        return Curve(mean, stderr)
    excess = values - shuffled
    change = excess[:, -1] - excess[:, 0]
    total, total_stderr = average(change[:, None], sequence)
    return Curve(
        mean,
        stderr,
        *average(shuffled, sequence),
        *average(excess, sequence),
        change=float(total[0]),
        change_stderr=float(total_stderr[0]),
        falling=float((change < 0).mean()),
    )


def average(values: np.ndarray, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over tokens of (M, N) and its standard error (N,), entries that are NaN left out.

    The error treats sequences as the independent units: with residual sums r_s of m sequences,
    SE² = m / (m − 1) · Σ_s r_s² / count². A single sequence falls back on its tokens as units.
    """
    counted = np.isfinite(values)
    count = counted.sum(0)
    clean = np.where(counted, values, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = clean.sum(0) / count
        units = np.unique(sequence, return_inverse=True)[1]
        if units.max(initial=0) == 0:
            units = np.arange(len(values))
        m = int(units.max(initial=0)) + 1
        residuals = np.zeros((m, values.shape[1]))
        np.add.at(residuals, units, np.where(counted, values - mean, 0.0))
        stderr = np.sqrt(m / (m - 1) * (residuals**2).sum(0)) / count if m > 1 else np.full(len(mean), np.nan)
    return mean, stderr


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
    inner = angle(arriving, leaving)  # NaN if there is no direction
    return torch.nn.functional.pad(inner, (1, 1), value=math.nan)


def target_numbers(unit: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """`angle_target` and `cos_target` (…, N) of unit states (…, N, d) to unit directions (…, d) of tokens."""
    aimed = tokens.unsqueeze(-2).expand_as(unit)
    return {"angle_target": angle(unit, aimed), "cos_target": (unit * aimed).sum(-1)}


def shares(points: Tensor, *, center: bool) -> dict[str, Tensor]:
    """Shares of attention and feed-forward in each block's step, from points (…, 2L + 1, d): entries (…, L).

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
    """Statistics of the lens for a target along paths, from log-probabilities (…, N, V), each entry (…, N).

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


MAX_LOGITS = 2**23
"""Logits that are in memory at a time."""


@dataclass(frozen=True)
class Trajectories(Result):
    """Averages over tokens, along the depth.

    `names` are the N points, `blocks` the blocks whose steps attention and feed-forward share.
    """

    model: str
    data: str
    target: str  # what a target is, in words
    names: list[str]
    blocks: list[str]
    num_tokens: int
    num_sequences: int
    num_shuffles: int
    curves: dict[str, Curve]  # over the points
    shares: dict[str, Curve]  # over the blocks
    notes: list[str]


@dataclass(frozen=True)
class Path(Result):
    """One prompt: every number of every token at every point, (T, N); NaN for targets past the end."""

    model: str
    prompt: str
    tokens: list[str]
    ids: np.ndarray  # (T,)
    names: list[str]
    values: dict[str, np.ndarray]
    shares: dict[str, np.ndarray]  # (T, L)
    states: np.ndarray  # (T, N, d) unit vectors: Px / |Px|
    words: np.ndarray  # (T, d) unit directions of the prompt's own tokens, as the readout sees them
    reads_id: np.ndarray  # (T, N) the lens's first token; −1 without a lens
    reads_p: np.ndarray  # (T, N) its probability
    notes: list[str]


def trajectories(model: Model, batches: Batches, *, num_shuffles: int = 2, seed: int = 0) -> Trajectories:
    """Measure the paths of all counted tokens.

    Targets are those of the batches: the next token of a causal model, the hidden one of a masked one, or
    whatever they say. The baseline gives every token the target of another one, by `num_shuffles`
    permutations of all counted targets: it has the same frequencies of tokens.
    """
    check_vocabulary(model)
    if num_shuffles < 1:
        raise UsageError(f"num_shuffles: expected at least 1, got {num_shuffles}")
    targets = torch.cat([batch.targets[batch.targets != IGNORED] for batch in batches])
    if len(targets) < 2:
        raise UsageError(f"expected at least 2 tokens that have a target, got {len(targets)}")
    orders = [torch.randperm(len(targets), generator=generator(seed, k)) for k in range(num_shuffles)]
    shuffled = torch.stack([targets[order] for order in orders])  # (K, M)
    kept: dict[str, list[np.ndarray]] = {}
    sequence, done, first, read, names = [], 0, 0, None, ()
    for batch in track(batches, "batches"):
        batch = batch.map(lambda t: t.to(model.device))
        seen = stream(model, batch.inputs)
        read = read or readout(model, seen)
        counted = batch.targets != IGNORED
        count = int(counted.sum())
        for name, found in _batch_numbers(model, read, seen, batch, shuffled[:, done : done + count]).items():
            kept.setdefault(name, []).append(found)
        sequence.append(first + counted.nonzero()[:, 0].cpu().numpy())
        done, first, names = done + count, first + batch.num_sequences, seen.names
    assert read is not None
    whole = {name: np.concatenate(found) for name, found in kept.items()}
    return _averaged(model, batches, whole, np.concatenate(sequence), list(names), read, num_shuffles)


def follow(model: Model, prompt: str | Sequence[int]) -> Path:
    """One prompt, token by token; the target of a token is the one after it, of the last there is none.

    For a model that is not causal the target of a token is itself.
    """
    check_vocabulary(model)
    ids = _prompt_ids(model, prompt)
    causal = model.facts.get("causal", True)
    inputs = torch.tensor([ids], device=model.device)
    seen = stream(model, inputs)
    read = readout(model, seen)
    targets = torch.tensor([*ids[1:], ids[-1]] if causal else ids, device=model.device)
    points = seen.points[0].double()
    current = inputs[0] if causal else None
    values = _point_numbers(read, points, seen.points[0], targets, current, targets[None])
    values = {name: v for name, v in values.items() if not name.startswith("shuffled.")}
    for name in ("angle_target", "cos_target", "logp_target", "log_rank", "top1", "gain"):
        if causal and name in values:
            values[name][-1] = np.nan  # the last token has no next one
    reads = _reads(read, seen.points[0])
    along = shares(points, center=read.center)
    return Path(
        model=model.name,
        prompt=prompt if isinstance(prompt, str) else " ".join(map(str, prompt)),
        tokens=names_of(model.tokenizer).texts(ids),
        ids=np.array(ids),
        names=list(seen.names),
        values=values,
        shares={name: found.cpu().numpy() for name, found in along.items()},
        states=read.unit(points).cpu().numpy(),
        words=read.token(inputs[0]).double().cpu().numpy(),
        reads_id=reads[0],
        reads_p=reads[1],
        notes=list(read.notes),
    )


def _batch_numbers(
    model: Model, read: Readout, seen: Stream, batch: Batch, shuffled: Tensor
) -> dict[str, np.ndarray]:
    """Return all numbers of the batch's counted tokens: (m, N), and (m, L) for the shares."""
    counted = batch.targets != IGNORED
    states = seen.points[counted]  # (m, N, d)
    ids = batch.inputs if isinstance(batch.inputs, Tensor) else batch.inputs["input_ids"]
    current = ids[counted] if model.facts.get("causal", True) else None
    points = states.double()
    found = _point_numbers(read, points, states, batch.targets[counted], current, shuffled.to(model.device))
    for name, value in shares(points, center=read.center).items():
        found[f"share.{name}"] = value.cpu().numpy()
    return found


def _point_numbers(
    read: Readout, points: Tensor, states: Tensor, targets: Tensor, current: Tensor | None, shuffled: Tensor
) -> dict[str, np.ndarray]:
    """Numbers of m paths: with `targets` (m,), and as `shuffled.…` the mean over the rows of `shuffled`."""
    unit = read.unit(points)
    found = path_numbers(points, unit)
    if read.U.shape[0] == points.shape[-1]:
        found |= target_numbers(unit, read.token(targets).double())
        others = [target_numbers(unit, read.token(row).double()) for row in shuffled]
        found |= {f"shuffled.{k}": torch.stack([o[k] for o in others]).mean(0) for k in others[0]}
    if read.has_logits:
        rows = max(1, MAX_LOGITS // (points.shape[1] * read.vocabulary))
        parts = [
            _lens(read, states[i : i + rows], targets[i : i + rows],
                  None if current is None else current[i : i + rows], shuffled[:, i : i + rows])
            for i in range(0, len(states), rows)
        ]  # fmt: skip
        found |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: value.detach().cpu().double().numpy() for name, value in found.items()}


def _lens(
    read: Readout, states: Tensor, targets: Tensor, current: Tensor | None, shuffled: Tensor
) -> dict[str, Tensor]:
    with torch.no_grad():
        logp = log_probabilities(read.logits(states))
    found = lens_numbers(logp, targets, current) | distribution_numbers(logp)
    others = [lens_numbers(logp, row, current) for row in shuffled]
    return found | {f"shuffled.{k}": torch.stack([o[k] for o in others]).mean(0) for k in others[0]}


def _reads(read: Readout, states: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The lens's first token and its probability at every point."""
    if not read.has_logits:
        return np.full(states.shape[:2], -1), np.full(states.shape[:2], np.nan)
    rows = max(1, MAX_LOGITS // (states.shape[1] * read.vocabulary))
    with torch.no_grad():
        best = [read.logits(part).double().softmax(-1).max(-1) for part in states.split(rows)]
    return (
        torch.cat([b.indices for b in best]).cpu().numpy(),
        torch.cat([b.values for b in best]).cpu().numpy(),
    )


def _averaged(
    model: Model,
    batches: Batches,
    whole: dict[str, np.ndarray],
    sequence: np.ndarray,
    names: list[str],
    read: Readout,
    num_shuffles: int,
) -> Trajectories:
    plain = [name for name in whole if "." not in name]
    causal = model.facts.get("causal", True)
    kind = "the next token" if causal else "the hidden token" if read.has_logits else "the token itself"
    return Trajectories(
        model=model.name,
        data=batches.name,
        target=kind,
        names=names,
        blocks=[name.removesuffix(".out") for name in names if name.endswith(".out")],
        num_tokens=len(sequence),
        num_sequences=len(np.unique(sequence)),
        num_shuffles=num_shuffles,
        curves={name: curve(whole[name], sequence, whole.get(f"shuffled.{name}")) for name in plain},
        shares={
            name.removeprefix("share."): curve(value, sequence)
            for name, value in whole.items()
            if name.startswith("share.")
        },
        notes=list(read.notes),
    )


def _prompt_ids(model: Model, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise UsageError(
                f"the model {model.name!r} has no tokenizer, so it cannot read the prompt {prompt!r}",
                hint="in Python, follow(model, [ids]) takes token ids",
            )
        ids = list(model.tokenizer.encode(prompt))
    else:
        ids = [int(i) for i in prompt]
    if len(ids) < 2:
        raise UsageError(
            f"expected a prompt of at least 2 tokens, got {len(ids)} in {prompt!r}",
            hint="a path leads from a token to the next one",
        )
    if model.n_ctx is not None and len(ids) > model.n_ctx:
        raise UsageError(f"expected a prompt of at most {model.n_ctx} tokens, got {len(ids)}")
    return ids
