"""Paths of tokens through a model: angles on the sphere, path length, turning, and the logit lens.

`trajectories` averages over a data set, and compares every quantity that has a target token with the same
quantity for shuffled targets. `follow` returns every token of one prompt.

Angles are in degrees. If states are normalized before they are read, angles do not change when a state is
multiplied by a positive number.
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

    If the quantity has a target token, `shuffled` is its mean for the targets of other tokens, `excess` the
    mean of real − shuffled over tokens, and `change` the excess at the last point minus that at the first.
    `falling` is the share of tokens with a negative change.
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
    """Return the curve of values (M, N) of M tokens; `sequence` (M,) is the sequence number of each token."""
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
    """Return the mean over tokens of (M, N) and its standard error (N,), ignoring NaN.

    The error treats sequences as the independent units: with residual sums r_s of m sequences,
    SE² = m / (m − 1) · Σ_s r_s² / count². For a single sequence the tokens are the units.
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
    """Return the angle between unit vectors in degrees, 2 atan2(|a − b|, |a + b|), also near 0 and 180."""
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) * DEGREES


def path_numbers(points: Tensor, unit: Tensor) -> dict[str, Tensor]:
    """Return the geometry of paths (…, N, d) on the sphere, each entry (…, N).

    `norm` is |x|. For the unit states `unit`: `angle_start`, `angle_end`, `cos_start` and `cos_end` relative
    to the first and last state; `step` from the previous point (0 at the first); `length`, the sum of steps;
    `turn`, the angle between the arriving and the leaving great circle (NaN at both ends and after a zero
    step).
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
    """Return the angle by which a path of unit vectors (…, N, d) turns: 0 is straight ahead, 180 is back."""
    point, before, after = unit[..., 1:-1, :], unit[..., :-2, :], unit[..., 2:, :]
    arriving, leaving = -_tangent_towards(point, before), _tangent_towards(point, after)
    inner = angle(arriving, leaving)  # NaN if there is no direction
    return torch.nn.functional.pad(inner, (1, 1), value=math.nan)


def target_numbers(unit: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Return `angle_target`, `cos_target` (…, N) between states (…, N, d) and token directions (…, d)."""
    directions = tokens.unsqueeze(-2).expand_as(unit)
    return {"angle_target": angle(unit, directions), "cos_target": (unit * directions).sum(-1)}


def shares(points: Tensor, *, center: bool) -> dict[str, Tensor]:
    """Return the shares of attention and feed-forward in each block's step: entries (…, L).

    For points (…, 2L + 1, d), each block's step is Δ = a + m (centered if `center`). The result has
    `attention_share` = ⟨a, Δ⟩ / |Δ|² (the feed-forward has the rest) and the lengths `attention_norm` |a| and
    `ff_norm` |m|.
    """
    x = points - points.mean(-1, keepdim=True) if center else points
    a, m = x[..., 1::2, :] - x[..., :-1:2, :], x[..., 2::2, :] - x[..., 1::2, :]
    block_step = a + m
    return {
        "attention_share": (a * block_step).sum(-1) / block_step.square().sum(-1),
        "attention_norm": a.norm(dim=-1),
        "ff_norm": m.norm(dim=-1),
    }


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log softmax in the last axis; −inf (an excluded token) becomes finite, so that 0 log 0 = 0."""
    return logits.clamp_min(-1e30).log_softmax(-1)


def lens_numbers(logp: Tensor, targets: Tensor, current: Tensor | None) -> dict[str, Tensor]:
    """Return statistics of the lens for a target, from log-probabilities (…, N, V); each entry is (…, N).

    `logp_target` is log p(target), `log_rank` the logarithm of the target's rank, `top1` is 1 if that rank is
    1, and `gain` is log p(target) − log p(current). `targets` and `current` are (…,).
    """
    target_logp = _pick(logp, targets)
    rank = 1 + (logp > target_logp.unsqueeze(-1)).sum(-1, dtype=torch.int32)
    numbers = {
        "logp_target": target_logp,
        "log_rank": rank.to(logp.dtype).log(),
        "top1": (rank == 1).to(logp.dtype),
    }
    return numbers if current is None else numbers | {"gain": target_logp - _pick(logp, current)}


def distribution_numbers(logp: Tensor) -> dict[str, Tensor]:
    """Return the `entropy` in nats and `kl_end` = KL(p_last ‖ p), from log-probabilities (…, N, V)."""
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    cross = -(logp @ p[..., -1, :, None]).squeeze(-1)
    return {"entropy": entropy, "kl_end": (cross - entropy[..., -1:]).clamp_min(0)}


def _pick(logp: Tensor, ids: Tensor) -> Tensor:
    """Return logp[…, n, ids[…]] for every n."""
    index = ids[..., None, None].expand(*logp.shape[:-1], 1)
    return logp.gather(-1, index).squeeze(-1)


def _tangent_towards(point: Tensor, target: Tensor) -> Tensor:
    """Return the unit tangent at `point` of the great circle to `target`; NaN if they are parallel."""
    v = target - (point * target).sum(-1, keepdim=True) * point
    size = v.norm(dim=-1, keepdim=True)
    return torch.where(size > 10 * torch.finfo(v.dtype).eps, v / size, math.nan)


MAX_LOGITS = 2**23
"""Number of logits in memory at a time."""


@dataclass(frozen=True)
class Trajectories(Result):
    """Averages over tokens, along the depth.

    `names` are the N points, `blocks` the blocks whose steps attention and feed-forward share.
    """

    model: str
    data: str
    target: str  # description of the targets
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
    words: np.ndarray  # (T, d) unit directions of the prompt's own tokens, in the space of the readout
    reads_id: np.ndarray  # (T, N) most probable token of the lens; −1 without a lens
    reads_p: np.ndarray  # (T, N) its probability
    notes: list[str]


def trajectories(model: Model, batches: Batches, *, num_shuffles: int = 2, seed: int = 0) -> Trajectories:
    """Measure the paths of all counted tokens.

    Targets are those of the batches, such as the next token of a causal model or the hidden token of a masked
    model. The baseline assigns every token the target of another one, by `num_shuffles` permutations of all
    counted targets, so that tokens keep their frequencies.
    """
    check_vocabulary(model)
    if num_shuffles < 1:
        raise UsageError(f"num_shuffles: expected at least 1, got {num_shuffles}")
    targets = torch.cat([batch.targets[batch.targets != IGNORED] for batch in batches])
    if len(targets) < 2:
        raise UsageError(f"expected at least 2 tokens that have a target, got {len(targets)}")
    orders = [torch.randperm(len(targets), generator=generator(seed, k)) for k in range(num_shuffles)]
    shuffled = torch.stack([targets[order] for order in orders])  # (K, M)
    values_by_name: dict[str, list[np.ndarray]] = {}
    sequence, num_done, first_sequence, lens, names = [], 0, 0, None, ()
    for batch in track(batches, "batches"):
        batch = batch.map(lambda t: t.to(model.device))
        residual_stream = stream(model, batch.inputs)
        lens = lens or readout(model, residual_stream)
        counted = batch.targets != IGNORED
        count = int(counted.sum())
        for name, numbers in _batch_numbers(
            model, lens, residual_stream, batch, shuffled[:, num_done : num_done + count]
        ).items():
            values_by_name.setdefault(name, []).append(numbers)
        sequence.append(first_sequence + counted.nonzero()[:, 0].cpu().numpy())
        num_done, first_sequence, names = (
            num_done + count,
            first_sequence + batch.num_sequences,
            residual_stream.names,
        )
    assert lens is not None
    values = {name: np.concatenate(numbers) for name, numbers in values_by_name.items()}
    return _averaged(model, batches, values, np.concatenate(sequence), list(names), lens, num_shuffles)


def follow(model: Model, prompt: str | Sequence[int]) -> Path:
    """Measure the path of every token of one prompt.

    The target of a token is the next token; the last token has none. In a model that is not causal the target
    of a token is the token itself.
    """
    check_vocabulary(model)
    ids = _prompt_ids(model, prompt)
    causal = model.facts.get("causal", True)
    inputs = torch.tensor([ids], device=model.device)
    residual_stream = stream(model, inputs)
    lens = readout(model, residual_stream)
    targets = torch.tensor([*ids[1:], ids[-1]] if causal else ids, device=model.device)
    points = residual_stream.points[0].double()
    current = inputs[0] if causal else None
    values = _point_numbers(lens, points, residual_stream.points[0], targets, current, targets[None])
    values = {name: v for name, v in values.items() if not name.startswith("shuffled.")}
    for name in ("angle_target", "cos_target", "logp_target", "log_rank", "top1", "gain"):
        if causal and name in values:
            values[name][-1] = np.nan  # the last token has no next one
    top_tokens = _top_tokens(lens, residual_stream.points[0])
    step_shares = shares(points, center=lens.center)
    return Path(
        model=model.name,
        prompt=prompt if isinstance(prompt, str) else " ".join(map(str, prompt)),
        tokens=names_of(model.tokenizer).texts(ids),
        ids=np.array(ids),
        names=list(residual_stream.names),
        values=values,
        shares={name: value.cpu().numpy() for name, value in step_shares.items()},
        states=lens.unit(points).cpu().numpy(),
        words=lens.token(inputs[0]).double().cpu().numpy(),
        reads_id=top_tokens[0],
        reads_p=top_tokens[1],
        notes=list(lens.notes),
    )


def _batch_numbers(
    model: Model, lens: Readout, residual_stream: Stream, batch: Batch, shuffled: Tensor
) -> dict[str, np.ndarray]:
    """Return all numbers of the batch's counted tokens: (m, N), and (m, L) for the shares."""
    counted = batch.targets != IGNORED
    states = residual_stream.points[counted]  # (m, N, d)
    ids = batch.inputs if isinstance(batch.inputs, Tensor) else batch.inputs["input_ids"]
    current = ids[counted] if model.facts.get("causal", True) else None
    points = states.double()
    numbers = _point_numbers(lens, points, states, batch.targets[counted], current, shuffled.to(model.device))
    for name, value in shares(points, center=lens.center).items():
        numbers[f"share.{name}"] = value.cpu().numpy()
    return numbers


def _point_numbers(
    lens: Readout, points: Tensor, states: Tensor, targets: Tensor, current: Tensor | None, shuffled: Tensor
) -> dict[str, np.ndarray]:
    """Return numbers of m paths for `targets` (m,), and as `shuffled.…` means over rows of `shuffled`."""
    unit = lens.unit(points)
    numbers = path_numbers(points, unit)
    if lens.U.shape[0] == points.shape[-1]:
        numbers |= target_numbers(unit, lens.token(targets).double())
        shuffled_numbers = [target_numbers(unit, lens.token(row).double()) for row in shuffled]
        numbers |= {
            f"shuffled.{k}": torch.stack([o[k] for o in shuffled_numbers]).mean(0)
            for k in shuffled_numbers[0]
        }
    if lens.has_logits:
        rows = max(1, MAX_LOGITS // (points.shape[1] * lens.vocabulary))
        parts = [
            _lens(lens, states[i : i + rows], targets[i : i + rows],
                  None if current is None else current[i : i + rows], shuffled[:, i : i + rows])
            for i in range(0, len(states), rows)
        ]  # fmt: skip
        numbers |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: value.detach().cpu().double().numpy() for name, value in numbers.items()}


def _lens(
    lens: Readout, states: Tensor, targets: Tensor, current: Tensor | None, shuffled: Tensor
) -> dict[str, Tensor]:
    with torch.no_grad():
        logp = log_probabilities(lens.logits(states))
    numbers = lens_numbers(logp, targets, current) | distribution_numbers(logp)
    shuffled_numbers = [lens_numbers(logp, row, current) for row in shuffled]
    return numbers | {
        f"shuffled.{k}": torch.stack([o[k] for o in shuffled_numbers]).mean(0) for k in shuffled_numbers[0]
    }


def _top_tokens(lens: Readout, states: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable token of the lens and its probability at every point."""
    if not lens.has_logits:
        return np.full(states.shape[:2], -1), np.full(states.shape[:2], np.nan)
    rows = max(1, MAX_LOGITS // (states.shape[1] * lens.vocabulary))
    with torch.no_grad():
        best = [lens.logits(part).double().softmax(-1).max(-1) for part in states.split(rows)]
    return (
        torch.cat([b.indices for b in best]).cpu().numpy(),
        torch.cat([b.values for b in best]).cpu().numpy(),
    )


def _averaged(
    model: Model,
    batches: Batches,
    values: dict[str, np.ndarray],
    sequence: np.ndarray,
    names: list[str],
    lens: Readout,
    num_shuffles: int,
) -> Trajectories:
    curve_names = [name for name in values if "." not in name]
    causal = model.facts.get("causal", True)
    target = "the next token" if causal else "the hidden token" if lens.has_logits else "the token itself"
    return Trajectories(
        model=model.name,
        data=batches.name,
        target=target,
        names=names,
        blocks=[name.removesuffix(".out") for name in names if name.endswith(".out")],
        num_tokens=len(sequence),
        num_sequences=len(np.unique(sequence)),
        num_shuffles=num_shuffles,
        curves={name: curve(values[name], sequence, values.get(f"shuffled.{name}")) for name in curve_names},
        shares={
            name.removeprefix("share."): curve(value, sequence)
            for name, value in values.items()
            if name.startswith("share.")
        },
        notes=list(lens.notes),
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
