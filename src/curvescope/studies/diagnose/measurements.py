"""The Hessian as a whole, block by block, and on disjoint parts of the data.

whole   P Lanczos runs: both ends of the spectrum, and the width of its bulk
rows    E‖(H v)_b‖² = ‖H_b:‖², the rows of a block b, for all blocks from the same few probes v
blocks  both ends of H_bb for every matrix
parts   λ_max, and the gradient by layers, on K disjoint parts of the data

What heads look at, and what they write.

liveness   (1 − Σ_j p_ij²) / (1 − 1/n_i), mean over queries i that see n_i > 1 keys: the trace of the
           softmax's Jacobian over that of equal weights, 1 for equal weights, 0 where all are on one key
mass       weight on the first key, mean over queries behind it
written    root mean square over tokens of what a head adds to the stream, P V W_O
change     of the loss without the head, for those that write less than a share of the usual

The sharpness that an optimizer sees, where a person names it and says as much of its state as is known.

SGD, with or without momentum, sees λ_max itself. Adam divides by √v: v is read from a file that
`torch.save(optimizer.state_dict(), file)` wrote, or it is the mean of squared gradients over disjoint parts
of the data, which is where v goes at these weights with batches of that size. Parameters are not touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import Sharpness, preconditioned_sharpness
from curvescope.algorithms.blocks.probes import extreme_ends, krylov_basis, ritz_ends
from curvescope.algorithms.stability.optimizers import Descent
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import probes
from curvescope.geometry.causal.steering import intervene
from curvescope.geometry.roles import weight
from curvescope.geometry.stream import stream
from curvescope.models.capture import capture
from curvescope.models.model import Model
from curvescope.models.running.attention_interventions import patterns
from curvescope.monitor import signals
from curvescope.operators import Hessian, per_sample
from curvescope.problem import Problem
from curvescope.sampling import Sampled
from curvescope.sampling.errors import Measured, extreme_in_span
from curvescope.studies.common.sampling import split_for
from curvescope.studies.problem_config import SampledOnData
from curvescope.studies.sinks.analysis import RitzLines, measure_lines
from curvescope.studies.sinks.study import cut_texts

FIRST = 100  # number of the first shared probe: not one of the Lanczos runs'
LAYER = re.compile(r"L(\d+)\.")
INSIDE = ("W_Q", "W_K", "W_QK")  # what only the softmax sees


@dataclass(frozen=True)
class Effort:
    """Accuracy of the measurements, and the way products are executed."""

    num_probes: int
    num_steps: int
    num_shared: int
    block_steps: int
    part_steps: int
    num_parts: int
    seed: int
    engine: str = "auto"
    checkpoint: bool = False


@dataclass(frozen=True)
class Whole(Result):
    """The loss, and the spectrum of the Hessian."""

    loss: float
    uniform: float  # loss of equal probabilities, log V; nan if outputs are not classes
    size: int  # n
    lines: RitzLines  # of one operator


@dataclass(frozen=True)
class Rows(Result):
    """Squared norms ‖(H v)_b‖² of B blocks for P probes v."""

    names: list[str]
    sizes: np.ndarray  # (B,)
    squares: np.ndarray  # (P, B)


@dataclass(frozen=True)
class BlockEnds(Result):
    """λ_max of every matrix H_bb, with its residual and the bound that it exceeds 5 times in 100."""

    names: list[str]
    top: np.ndarray  # (B,)
    error: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Parts(Result):
    """λ_max on K disjoint parts of the data, and squared gradient norms of L layers."""

    top: np.ndarray  # (K,)
    error: np.ndarray  # (K,) residuals
    gradient: np.ndarray  # (L,) of all data
    without: np.ndarray  # (K, L) of all data but one part
    sampled: Sampled | None = None  # λ_max of all data with both errors; None if they were not measured
    reason: str = ""  # why they were not


def measure_whole(problem: Problem, effort: Effort) -> Whole:
    """The ends and the bulk."""
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    lines = measure_lines(H, num_probes=effort.num_probes, num_steps=effort.num_steps, seed=effort.seed)
    return Whole(problem.loss_value(), uniform_loss(problem), H.shape[0], lines)


def uniform_loss(problem: Problem) -> float:
    """log V, the cross-entropy of outputs that prefer nothing; nan for another loss, and for a sum."""
    batch = problem.batches[0].map(problem.placed)
    with torch.no_grad():
        z = problem.outputs(batch[:1])
    return signals.uniform_loss(problem, z)


def measure_rows(problem: Problem, effort: Effort) -> Rows:
    """All blocks from shared probes."""
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    squares = []
    with H.frozen():
        for i in track(range(effort.num_shared), "probes"):
            v = probes(H.shape[0], 1, seed=effort.seed, first=FIRST + i, dtype=H.dtype, device=H.device)
            parts = H.space.to_dict((H @ v)[:, 0])
            squares.append([float(part.double().square().sum()) for part in parts.values()])
    sizes = [block.size for block in H.space]
    return Rows([block.name for block in H.space], np.array(sizes), np.array(squares))


def matrices(problem: Problem) -> list[str]:
    """Blocks with two axes or more among what varies."""
    return [block.name for block in problem.space() if len(block.shape) > 1]


def measure_blocks(problem: Problem, effort: Effort) -> BlockEnds:
    """Matrix by matrix, a few Lanczos steps each."""
    names, ends_of_blocks = matrices(problem), []
    for name in track(names, "blocks"):
        H = Hessian(problem, name, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
        ends_of_blocks.append(extreme_ends(H, num_steps=effort.block_steps, seed=effort.seed))
    return BlockEnds(
        names,
        np.array([ends.values[1] for ends in ends_of_blocks]),
        np.array([ends.residuals[1] for ends in ends_of_blocks]),
        np.array([ends.high for ends in ends_of_blocks]),
    )


def measure_parts(problem: Problem, effort: Effort, cfg: SampledOnData, whole: Whole) -> Parts:
    """Disjoint parts, one after the other; their eigenvectors give λ_max of all data a sampling error."""
    parts = cut_texts(problem, effort.num_parts)
    tops, errors, gradients, shares, vectors = [], [], [], [], []
    for part in track(parts, "parts of the data"):
        H = Hessian(part, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
        krylov = krylov_basis(H, effort.part_steps, seed=effort.seed)
        ends = ritz_ends(krylov, H)
        top = torch.as_tensor(np.linalg.eigh(krylov.T[:-1])[1][:, -1:]).to(krylov.Q)
        vectors.append(krylov.Q.T @ top)
        tops.append(ends.values[1])
        errors.append(ends.residuals[1])
        gradients.append(part.gradient())
        shares.append(part.num_terms / problem.num_terms)
    total = sum((w * g for w, g in zip(shares, gradients, strict=True)), torch.zeros_like(gradients[0]))
    without = [by_layer(problem, total - w * g) for w, g in zip(shares, gradients, strict=True)]
    sampled, reason = _sampled_top(problem, effort, cfg, whole, torch.cat(vectors, 1))
    return Parts(
        np.array(tops), np.array(errors), by_layer(problem, total), np.array(without), sampled, reason
    )


def _sampled_top(
    problem: Problem, effort: Effort, cfg: SampledOnData, whole: Whole, vectors: Tensor
) -> tuple[Sampled | None, str]:
    """λ_max of all data with both errors, or why they are not known."""
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    split, ends = split_for(H, cfg), whole.lines.ends()
    value, residual = float(ends.top[0]), float(ends.top_error[0])
    if isinstance(split, str) or not value > 0:
        return None, split if isinstance(split, str) else ""
    return extreme_in_span(split, vectors, "largest", Measured(value, residual, 0)), ""


def by_layer(problem: Problem, vector: torch.Tensor) -> np.ndarray:
    """Squared norms of a vector over the matrices of each layer but W_Q and W_K: (L,), empty without layers.

    Queries and keys get hardly any gradient where all weights are equal, which says nothing of depth.
    """
    squares: dict[int, float] = {}
    for name, part in problem.space().to_dict(vector).items():
        layer = LAYER.match(name)
        if layer is not None and part.dim() > 1 and not name.endswith(INSIDE):
            squares[int(layer[1])] = squares.get(int(layer[1]), 0.0) + float(part.double().square().sum())
    return np.array([squares[i] for i in sorted(squares)])


# ------------------------------------------------------------------------------------------------------ depth


@dataclass(frozen=True)
class Depth(Result):
    """Root mean squares over the tokens of S sequences; `why` says why they are not known."""

    embedded: np.ndarray  # (S,) of the stream where the layers begin
    added: np.ndarray  # (S,) of what all layers have added at the end
    norm: str  # where norms stand: pre, post, none; "" if unknown
    num_layers: int
    why: str = ""


def measure_depth(problem: Problem) -> Depth:
    """Measure the residual stream on all sequences."""
    model = problem.model
    norm, layers = str(model.facts.get("norm", "")), int(model.facts.get("n_layers", 0))
    embedded, added = [], []
    try:
        for batch in problem.batches:
            points = stream(model, batch.map(problem.placed).inputs).blocks.double()
            first, last = points[:, :, 0], points[:, :, -1]
            embedded.append(_rms(first))
            added.append(_rms(last - first))
    except (CurvescopeError, KeyError) as error:
        words = error.message if isinstance(error, CurvescopeError) else f"no {error} is known"
        return Depth(np.zeros(0), np.zeros(0), norm, layers, words)
    return Depth(np.concatenate(embedded), np.concatenate(added), norm, layers)


def _rms(x: torch.Tensor) -> np.ndarray:
    """Root mean square of each sequence of (B, T, d)."""
    return x.square().mean((1, 2)).sqrt().cpu().numpy()


# ------------------------------------------------------------------------------------------------------ heads

SILENT = 0.01  # of the usual: heads that are ablated to see what they are for
Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Heads(Result):
    """L layers with h heads over S sequences; what is not known is empty, and `why…` says why."""

    liveness: np.ndarray  # (S, L, h)
    mass: np.ndarray  # (S, L, h)
    written: np.ndarray  # (L, h)
    change: np.ndarray  # (L, h) nan where the head was not ablated
    why_patterns: str = ""
    why_written: str = ""


def measure_heads(problem: Problem) -> Heads:
    """Measure the heads on all sequences; nothing is changed."""
    model, nothing = problem.model, np.zeros((0, 0))
    placed = [batch.map(problem.placed).inputs for batch in problem.batches]
    live = mass = np.zeros((0, 0, 0))
    written = change = nothing
    why_patterns = why_written = ""
    try:
        seen = [_attention(model, inputs) for inputs in placed]
        live, mass = (torch.cat([both[k] for both in seen]).cpu().numpy() for k in (0, 1))
    except UsageError as error:
        why_patterns = error.message
    try:
        written = _written(model, placed)
        change = _changes(problem, written)
    except (UsageError, KeyError) as error:
        why_written = error.message if isinstance(error, UsageError) else f"no {error} is known"
    return Heads(live, mass, written, change, why_patterns, why_written)


def _attention(model: Model, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Liveness and mass: (B, L, h) each."""
    live, mass = [], []
    for P in patterns(model, inputs):
        P = P.double()
        T = P.shape[-1]
        if T < 2 or P.shape[-2] != T:
            raise UsageError("expected sequences of at least two tokens that look at themselves")
        causal = bool((P.triu(1) == 0).all())
        seen = torch.arange(1, T + 1, device=P.device) if causal else torch.full((T,), T, device=P.device)
        spread = (1 - P.square().sum(-1))[..., 1:] / (1 - 1 / seen[1:])
        live.append(spread.mean(-1))
        mass.append(P[..., 1:, 0].mean(-1))
    return torch.stack(live, dim=1), torch.stack(mass, dim=1)


def _written(model: Model, placed: list[Inputs]) -> np.ndarray:
    """(L, h)."""
    h, k = int(model.facts["n_heads"]), int(model.facts["d_head"])
    num_layers = int(model.facts["n_layers"])
    squares, count = torch.zeros(num_layers, h, dtype=torch.float64), 0
    for inputs in placed:
        F = capture(model, inputs, "L*.attn.heads")
        for i in range(num_layers):
            own = F[f"L{i}.attn.heads"].reshape(-1, h * k).cpu().double()
            count += len(own) if i == 0 else 0
            for j in range(h):
                W_O = weight(model, f"L{i}.h{j}.W_O")
                if W_O is None:
                    raise UsageError(f"what single heads of {model.name} write is not known")
                squares[i, j] += (own[:, k * j : k * j + k] @ W_O.double()).square().sum()
    return (squares / count).sqrt().numpy()


def _changes(problem: Problem, written: np.ndarray) -> np.ndarray:
    """Change of the loss without each of the heads that write hardly anything."""
    changes, usual = np.full(written.shape, np.nan), float(np.median(written))
    for i, j in zip(*np.nonzero(written < SILENT * usual), strict=True):
        changes[i, j] = intervene(problem, f"L{i}.h{j}.out", torch.neg).loss_change[0]
    return changes


# ---------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True)
class Samples(Result):
    """S sequences; `why` says why their gradients are not known, and is empty where they are."""

    num_sequences: int
    copies: np.ndarray  # of every sequence of the data, the number of the first that equals it: itself
    numbers: np.ndarray  # (S,) which sequence of the data each is; those without a counted target are none
    losses: np.ndarray  # (S,)
    gradient_norms: np.ndarray  # (S,)
    traces: np.ndarray  # (S,) of the GGN of each
    traces_stderr: np.ndarray  # (S,)
    why: str = ""


def measure_samples(problem: Problem, *, num_probes: int, seed: int) -> Samples:
    """Measure each sequence by itself; all share the probes of the traces."""
    copies = first_equal(problem)
    try:
        samples = per_sample(problem)
        with samples.frozen():
            traces = samples.traces("ggn", num_probes=num_probes, seed=seed)
            losses, norms, numbers = samples.losses(), samples.gradient_norms(), samples.sequences
    except UsageError as error:
        none = np.zeros(0)
        return Samples(len(copies), copies, none, none, none, none, none, error.message)
    return Samples(len(copies), copies, numbers, losses, norms, traces.values, traces.stderr)


def first_equal(problem: Problem) -> np.ndarray:
    """Number each sequence by the first one with the same inputs and targets."""
    seen: dict[tuple[bytes, ...], int] = {}
    firsts = []
    for batch in problem.batches:
        tensors = [tensor.detach().cpu().contiguous() for tensor in batch.tensors()]
        for i in range(batch.num_sequences):
            key = tuple(tensor[i].numpy().tobytes() for tensor in tensors)
            firsts.append(seen.setdefault(key, len(firsts)))
    return np.array(firsts)


# -------------------------------------------------------------------------------------------------- optimizer

Name = Literal["sgd", "adam", "adamw"]
KINDS: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
TOL, MOST = 1e-2, 60  # of the preconditioned λ_max: relative, and products
MANY = 10_000  # steps of a fresh Adam: its running means have settled
MEASURED = "its second moments are those of gradients on {} disjoint parts of the data"


def sgd_sharpness(whole: Whole, momentum: float, seed: int) -> Sharpness:
    """Largest stable learning rate from the spectrum that is known already."""
    if not 0 <= momentum < 1:
        raise UsageError(f"momentum: expected at least 0 and below 1, got {momentum:g}")
    descent, ends = Descent("", None, None, momentum), whole.lines.ends()
    top, error = float(ends.top[0]), float(ends.top_error[0])
    return Sharpness(
        value=top,
        residual=error,
        converged=error <= TOL * abs(top),
        max_learning_rate=descent.threshold / top if top > 0 else float("inf"),
        learning_rate=float("nan"),
        formula=descent.formula,
        momentum=momentum,
        optimizer=f"SGD with momentum {momentum:g}" if momentum else "SGD",
        assumed=["every step uses the gradient of this data"],
        num_products=0,
        tol=TOL,
        seed=seed,
    )


def adam_sharpness(
    problem: Problem, name: Name, state: str | None, effort: Effort, lr: float | None = None
) -> Sharpness:
    """Sharpness λ_max of P^(−½) H P^(−½), with P from a file or from gradients.

    A schedule that has ended leaves learning rates of zero in its file; `lr` is taken for them.
    """
    optimizer = KINDS[name](list(problem.model.parameters()), lr=1.0, weight_decay=0.0)
    words = []
    if state is None:
        parts = cut_texts(problem, effort.num_parts)
        fill(optimizer, problem, parts)
        words.append(MEASURED.format(len(parts)))
    else:
        read_state(optimizer, problem, state)
        if lr is not None and not any(float(group["lr"]) > 0 for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["lr"] = lr
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    sharpness = preconditioned_sharpness(H, optimizer, tol=TOL, max_products=MOST, seed=effort.seed)
    return _with_notes(sharpness, words, known=state is not None)


def _with_notes(sharpness: Sharpness, words: list[str], *, known: bool) -> Sharpness:
    rate = sharpness.learning_rate if known else float("nan")
    return replace(sharpness, learning_rate=rate, assumed=[*sharpness.assumed, *words])


def fill(optimizer: torch.optim.Optimizer, problem: Problem, parts: Sequence[Problem]) -> None:
    """Give a fresh Adam the second moments of the parts' gradients, as after many steps."""
    squares: Tensor = torch.stack([part.gradient().square() for part in parts]).mean(0)
    for name, v in problem.space().scatter(squares).items():
        p = problem.model.get_parameter(name)
        optimizer.state[p] = {
            "step": torch.tensor(float(MANY)),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": v.detach(),
        }


def read_state(optimizer: torch.optim.Optimizer, problem: Problem, file: str) -> None:
    """Load what `optimizer.state_dict()` was, of all parameters of the model.

    Parameters are numbered there as they were given: in the order of the model, or matrices first if groups
    have different weight decay. Shapes tell which.
    """
    try:
        saved = torch.load(Path(file), map_location=problem.device, weights_only=True)
        groups, entries = saved["param_groups"], saved["state"]
        shapes = [tuple(entries[i]["exp_avg_sq"].shape) for group in groups for i in group["params"]]
    except Exception as error:
        raise UsageError(
            f"optimizer_state: expected the state_dict of an Adam that took a step, could not read {file}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="torch.save(optimizer.state_dict(), 'optimizer.pt')",
        ) from error
    own = list(problem.model.parameters())
    orders = [own, [p for p in own if p.dim() > 1] + [p for p in own if p.dim() <= 1]]
    fitting = next((order for order in orders if [tuple(p.shape) for p in order] == shapes), None)
    if fitting is None:
        raise UsageError(
            f"optimizer_state: expected {len(own)} parameters with the shapes of {problem.model.name}, in "
            "its "
            f"order or matrices first, got {len(shapes)} others in {file}"
        )
    numbered = zip(fitting, [i for group in groups for i in group["params"]], strict=True)
    of = {i: p for p, i in numbered}
    for i, p in of.items():
        optimizer.state[p] = entries[i]
    own_settings = optimizer.param_groups[0]
    optimizer.param_groups = [
        {**own_settings, **group, "params": [of[i] for i in group["params"]]} for group in groups
    ]
