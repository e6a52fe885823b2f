"""Interventions that grow an attention sink, and their effect on the spectrum of the Hessian.

Each intervention has a strength; strength 0 leaves the model unchanged.

Both ends of a spectrum, its bulk and its outliers come from a few Lanczos runs with separate probes. A run of
m steps from a random vector v gives nodes θᵢ and weights wᵢ with Σ wᵢ f(θᵢ) = vᵀ f(A) v / n for polynomials f
of degree below 2m, and approximately for smooth f. Outliers are counted softly, by f = φ(λ/τ),

    φ(x) = x⁴ / (1 + x⁴),    outliers N = tr φ(A/τ),    bulk width = √(tr[A² (1 − φ(A/τ))] / (n − N)),

because few steps cannot resolve a sharp threshold in the middle of a tail. The width is the root mean square
of the eigenvalues below τ; an outlier contributes at most τ.

Effects are relative to the unchanged model on the same texts and with the same probes. Differences are of
logarithms, so an effect is a factor. On one text it has a numerical error: the residuals for an eigenvalue;
for the bulk, the interval over paired probes and the change in the last Lanczos steps. Over texts it has a 95
% interval, which contains the variation between texts. The first is noise of the computation, the second says
if an effect holds on other texts of the same kind. Each text has its own probes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import lanczos
from curvescope.algorithms.checks import GIB
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result
from curvescope.core.seeds import probes
from curvescope.data.batches import IGNORED, Batch, Batches
from curvescope.geometry.roles import weight
from curvescope.geometry.stream import stream
from curvescope.models.capture import capture
from curvescope.models.model import Model
from curvescope.models.running.attention_interventions import (
    UNCHANGED_ATTENTION,
    AttentionChange,
    changed_attention,
    patterns,
)
from curvescope.operators import GGN, Hessian
from curvescope.problem import Problem
from curvescope.studies.common.statistics import half_width, mean_interval
from curvescope.tokenizers import as_tokenizer

if TYPE_CHECKING:
    from curvescope.studies.sinks.study import Sinks

UNCHANGED = "unchanged"
HOWS = {
    "bias": "score bias at the first key",
    "key": "first key × (1 + strength)",
    "inserted": "sink tokens in front",
    "softmax_one": "weight of the one in the denominator",
    "gated": "heads × (1 − strength)",
    "activation": "stream at the first token × 2^strength",
}
"""Meaning of the strength of each intervention."""


class Intervention(NamedTuple):
    """One intervention at one strength."""

    how: str
    strength: float

    @property
    def name(self) -> str:
        """Name such as `bias.2`; `unchanged` at strength 0."""
        return f"{self.how}.{self.strength:g}" if self.strength else UNCHANGED

    @property
    def change(self) -> AttentionChange:
        """Return the change of the module's attention."""
        s = self.strength
        changes: dict[str, AttentionChange] = {
            "bias": AttentionChange(bias=s),
            "key": AttentionChange(key=1 + s),
            "softmax_one": AttentionChange(extra=s),
            "gated": AttentionChange(gate=1 - s),
            "activation": AttentionChange(first=2**s),
        }
        return changes.get(self.how, UNCHANGED_ATTENTION) if s else UNCHANGED_ATTENTION

    @property
    def num_inserted(self) -> int:
        """Number of tokens inserted before every sequence."""
        return int(self.strength) if self.how == "inserted" else 0

    def batches(self, batches: Batches, token: int) -> Batches:
        """Return the data for this intervention; the terms of the loss stay the same."""
        if not self.num_inserted:
            return batches
        return Batches([_inserted(b, self.num_inserted, token) for b in batches], name=batches.name)


def _inserted(batch: Batch, count: int, token: int) -> Batch:
    """Insert `count` copies of a token before every sequence, with targets that do not count."""
    assert isinstance(batch.inputs, Tensor)
    front = batch.inputs.new_full((len(batch.inputs), count), token)
    weights = batch.weights
    if weights is not None and weights.shape == batch.targets.shape:
        weights = torch.cat([torch.zeros_like(front, dtype=weights.dtype), weights], dim=1)
    targets = torch.cat([torch.full_like(front, IGNORED), batch.targets], dim=1)
    return Batch(torch.cat([front, batch.inputs], dim=1), targets, weights)


def possible(
    ways: list[Intervention], model: Model, batches: Batches
) -> tuple[list[Intervention], list[str]]:
    """Return the interventions that are possible for this model and data, and a note on the others."""
    refused: dict[str, list[str]] = {}
    for way in {way.how: way for way in ways}.values():
        why = reach(model, batches, way.change)
        if why:
            refused.setdefault(why, []).append(way.how)
    ways = [way for way in ways if not any(way.how in hows for hows in refused.values())]
    notes = [f"{why}; left out: {', '.join(hows)}" for why, hows in refused.items()]
    inserted = [way for way in ways if way.num_inserted]
    why = _not_insertable(max((way.num_inserted for way in inserted), default=0), model, batches)
    if inserted and why:
        ways = [way for way in ways if not way.num_inserted]
        notes.append(f"no token can be inserted: {why}; left out: inserted")
    return ways, notes


def reach(model: Model, batches: Batches, how: AttentionChange) -> str:
    """Return why the model's attention cannot be changed so, tested on one sequence; else an empty text."""
    try:
        with changed_attention(model, how):
            model.evaluate(batches[0][:1].inputs)
    except UsageError as error:
        return str(error)
    return ""


def _not_insertable(most: int, model: Model, batches: Batches) -> str:
    inputs, targets = batches[0].inputs, batches[0].targets
    tokens = isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
    if not tokens or not isinstance(targets, Tensor) or targets.shape != inputs.shape:
        return "the data are not tokens with a target for each"
    length = max(b.targets.shape[1] for b in batches) + most
    if model.n_ctx is not None and length > model.n_ctx:
        return f"{length} positions are more than the {model.n_ctx} of {model.name}"
    return ""


def sink_token(model: Model, requested: int | None = None) -> int:
    """Return the requested token; by default the model's beginning-of-sequence token, a new line, or 0."""
    config: Any = getattr(model.module, "config", None)
    named, vocab = getattr(config, "bos_token_id", None), model.facts.get("vocab_size", 0)
    if requested is not None:
        if not 0 <= requested < (vocab or requested + 1):
            raise UsageError(
                f"token: expected an id from 0 to {vocab - 1} of {model.name!r}, got {requested}"
            )
        return requested
    if isinstance(named, int) and 0 <= named < vocab:
        return named
    return as_tokenizer(model.tokenizer).encode("\n")[0] if model.tokenizer is not None else 0


def sink_mass(model: Model, batches: Batches, way: Intervention) -> float:
    """Mean attention weight of the sink, over heads and over the queries after it.

    It is one minus the weight on tokens after the sink: the weight on the first token, the inserted tokens,
    and the one in the denominator, before a gate.
    """
    sinks = max(1, way.num_inserted)
    total, count = 0.0, 0
    for batch in batches:
        inputs = batch.map(lambda t: t.to(model.device)).inputs
        for P in patterns(model, inputs, way.change):
            mass = 1 - P[:, :, sinks:, sinks:].double().sum(-1)
            total, count = total + float(mass.sum()), count + mass.numel()
    return total / max(count, 1)


# ------------------------------------------------------------------------------------------------------ heads

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class SinkHeads(Result):
    """Sinks of L layers with h heads; quantities that the model hides are nan, with reasons in `notes`."""

    mass: np.ndarray  # (L, h) mean weight on the first token over later queries
    mass_spread: np.ndarray  # (L, h) standard deviation over sequences
    values: np.ndarray  # (L, h) norm of the first token's value over the mean norm of the others'
    points: list[str]  # points of the stream: in, L0, L1, …
    massive: np.ndarray  # (N,) largest |x| over the median |x| at the first token, mean over sequences
    massive_others: np.ndarray  # (N,) the same, mean over the other tokens
    notes: list[str]


def find_sinks(model: Model, batches: Batches) -> SinkHeads:
    """Measure the sinks of the unchanged model on all sequences."""
    placed = [batch.map(lambda t: t.to(model.device)).inputs for batch in batches]
    notes: list[str] = []
    mass = _tried(lambda: torch.cat([_masses(model, x) for x in placed]), notes)
    values = _tried(lambda: torch.cat([_value_ratios(model, x) for x in placed]), notes)
    points = _tried(lambda: torch.cat([_massive(model, x) for x in placed]), notes)
    names = [] if points is None else ["in", *(f"L{i}" for i in range(points.shape[-1] - 1))]
    both = np.full((2, 0), np.nan) if points is None else points.mean(0).numpy()
    nothing = np.full((0, 0), np.nan) if mass is None else np.full(mass.shape[1:], np.nan)
    return SinkHeads(
        mass=nothing if mass is None else mass.mean(0).numpy(),
        mass_spread=nothing if mass is None else mass.std(0, correction=0).numpy(),
        values=nothing if values is None else values.mean(0).numpy(),
        points=names,
        massive=both[0],
        massive_others=both[1],
        notes=notes,
    )


def _tried(measure: Callable[[], Tensor], notes: list[str]) -> Tensor | None:
    """Return the measurement, or None with a note if the model does not expose it."""
    try:
        return measure().double().cpu()
    except UsageError as error:
        if str(error) not in notes:
            notes.append(str(error))
        return None


def _masses(model: Model, inputs: Inputs) -> Tensor:
    """Mean attention weight on the first token: (B, L, h)."""
    found = patterns(model, inputs)
    if found[0].shape[-2] < 2:
        raise UsageError(
            "expected sequences of at least two tokens, because later tokens attend to the first"
        )
    return torch.stack([P[:, :, 1:, 0].mean(-1) for P in found], dim=1)


def _value_ratios(model: Model, inputs: Inputs) -> Tensor:
    """‖v_0‖ over the mean of ‖v_j‖, j ≥ 1, per sequence: (B, L, h); heads of a group share values."""
    reads = capture(model, inputs, "L*.attn.in")
    h, kv = int(model.facts["n_heads"]), int(model.facts.get("n_kv_heads", model.facts["n_heads"]))
    layers = []
    for i in range(int(model.facts["n_layers"])):
        x, ratios = reads[f"L{i}.attn.in"].cpu(), []
        for j in range(kv):
            W, b = weight(model, f"L{i}.h{j}.W_V"), weight(model, f"L{i}.h{j}.b_V")
            if W is None:
                raise UsageError(f"the values of the single heads of {model.name} are unknown")
            norms = (x @ W if b is None else x @ W + b).norm(dim=-1)
            ratios.append(norms[:, 0] / norms[:, 1:].mean(-1))
        layers.append(torch.stack(ratios, dim=-1).repeat_interleave(h // kv, dim=-1))
    return torch.stack(layers, dim=1)


def _massive(model: Model, inputs: Inputs) -> Tensor:
    """Largest over median |x| at the first token, and the mean over the others: (B, 2, L + 1)."""
    sizes = stream(model, inputs).blocks.abs()  # (B, T, N, d)
    ratios = sizes.amax(-1) / sizes.median(-1).values.clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.stack([ratios[:, 0], ratios[:, 1:].mean(1)], dim=1)


# ------------------------------------------------------------------------------------------------------ lines

ROUNDINGS = 16  # precision of the products, in roundings of the largest Ritz value
EARLIER = 2  # number of last steps whose effect is measured
NOTHING = 1e-25  # smaller weights are rounding errors of an exhausted Krylov space
BASIS_GIB = 4  # memory limit of the bases; above it, vectors are orthogonalized only against the last two


Nodes = tuple[np.ndarray, np.ndarray, np.ndarray]


class SpectrumEnds(NamedTuple):
    """Ends of a spectrum: an eigenvalue lies within the error; λ_max ≥ `top` and λ_min ≤ `bottom`."""

    top: np.ndarray  # (X,)
    top_error: np.ndarray
    bottom: np.ndarray
    bottom_error: np.ndarray


class BulkSplit(NamedTuple):
    """Bulk width and number of outliers for each probe."""

    width: np.ndarray  # (X, P)
    outliers: np.ndarray  # (X, P)


@dataclass(frozen=True)
class RitzLines(Result):
    """P Lanczos runs of at most m steps on each of X operators of one size."""

    alpha: np.ndarray  # (X, P, m)
    beta: np.ndarray  # (X, P, m); the last one couples to the next, unused vector
    lengths: np.ndarray  # (X, P) steps until the Krylov space was exhausted
    size: int  # n
    eps: float  # rounding error of the products

    @property
    def num_steps(self) -> int:
        """m."""
        return self.alpha.shape[-1]

    def ends(self) -> SpectrumEnds:
        """Outermost Ritz values over the probes of each operator, with their residuals."""
        return self._ends

    @cached_property
    def _ends(self) -> SpectrumEnds:
        theta, weights, residuals = (part.reshape(len(self.alpha), -1) for part in self._nodes(0))
        there = weights > NOTHING
        row = np.arange(len(theta))
        high, low = (np.where(there, sign * theta, -np.inf).argmax(1) for sign in (1, -1))
        rounding = ROUNDINGS * self.eps * np.maximum(np.abs(theta[row, high]), np.abs(theta[row, low]))
        errors = [residuals[row, at] + rounding for at in (high, low)]
        return SpectrumEnds(theta[row, high], errors[0], theta[row, low], errors[1])

    def split(self, tau: np.ndarray, *, earlier: int = 0) -> BulkSplit:
        """Bulk width and outliers at the thresholds τ (X,), without the last `earlier` steps."""
        theta, weights, _ = self._nodes(earlier)
        far = (theta / tau[:, None, None]) ** 4
        outliers = self.size * (weights * far / (1 + far)).sum(-1)
        squares = self.size * (weights * theta**2 / (1 + far)).sum(-1)
        return BulkSplit(np.sqrt(squares / (self.size - outliers)), outliers)

    def _nodes(self, earlier: int) -> Nodes:
        """Nodes, weights and residuals of all runs, (X, P, m); nodes beyond an exhausted space weigh zero."""
        if earlier not in self._nodes_by_earlier:
            self._nodes_by_earlier[earlier] = self._diagonalized(earlier)
        return self._nodes_by_earlier[earlier]

    @cached_property
    def _nodes_by_earlier(self) -> dict[int, Nodes]:
        return {}

    def _diagonalized(self, earlier: int) -> Nodes:
        m = max(1, self.num_steps - earlier)
        T = np.zeros((*self.lengths.shape, m, m))
        steps = np.arange(m)
        T[..., steps, steps] = self.alpha[..., :m]
        T[..., steps[1:], steps[:-1]] = self.beta[..., : m - 1]
        theta, S = np.linalg.eigh(T)  # reads the lower triangle
        return theta, S[..., 0, :] ** 2, self.beta[..., m - 1, None] * np.abs(S[..., -1, :])


def measure_lines(
    op: LinearOperator, *, num_probes: int, num_steps: int, seed: int, first: int = 0
) -> RitzLines:
    """Run Lanczos on one operator (X = 1). Equal seeds give equal probes, numbered from `first`."""
    start = probes(op.shape[0], num_probes, seed=seed, first=first, dtype=op.dtype, device=op.device)
    kept = basis_length(op, num_probes, num_steps) > num_steps
    runs = lanczos(op, start, num_steps, reorthogonalize=kept)
    eps = torch.finfo(op.dtype).eps
    return RitzLines(runs.alpha[None], runs.beta[None], runs.lengths[None], op.shape[0], eps)


def basis_length(op: LinearOperator, num_probes: int, num_steps: int) -> int:
    """Number of vectors that each run stores: all, or two if all of them need too much memory."""
    size = num_probes * (num_steps + 1) * op.shape[0] * op.dtype.itemsize
    return num_steps + 1 if size <= BASIS_GIB * GIB else 2


def stacked(lines: list[RitzLines]) -> RitzLines:
    """Concatenate results of the same shape."""
    return RitzLines(
        alpha=np.concatenate([one.alpha for one in lines]),
        beta=np.concatenate([one.beta for one in lines]),
        lengths=np.concatenate([one.lengths for one in lines]),
        size=lines[0].size,
        eps=lines[0].eps,
    )


# ------------------------------------------------------------------------------------------------------ moved

GROUPS = {
    "embeddings": ("E", "P", "W_in"),
    "queries, keys": ("L*.W_[QK]", "L*.W_QK"),
    "values, outputs": ("L*.W_[VO]",),
    "feed-forward": ("L*.W_[12gu]", "L*.W_gu"),
    "norms, biases": ("L*.b_*", "*.g", "*.b"),
    "unembedding": ("U",),
}
"""Groups of blocks that are measured together, by glob patterns."""


@dataclass(frozen=True)
class SinkEffort(Result):
    """Numbers of probes and steps, and the execution of products."""

    num_probes: int
    num_steps: int
    ggn_steps: int
    block_steps: int
    seed: int
    engine: str
    checkpoint: bool


@dataclass(frozen=True)
class SinkSpectra(Result):
    """Measurements for one intervention at one strength, on X texts."""

    mass: np.ndarray  # (X,) attention weight of the sink; nan if attention is not accessible
    loss: np.ndarray  # (X,)
    hessian: RitzLines
    ggn: RitzLines  # from a single probe


@dataclass(frozen=True)
class SinkBlocks(Result):
    """λ_max of groups of diagonal blocks of the Hessian on one text; an eigenvalue lies within the error."""

    names: list[str]
    values: np.ndarray  # (G,)
    errors: np.ndarray  # (G,)


def measure_moved(
    texts: list[Problem], way: Intervention, token: int, effort: SinkEffort, *, reached: bool
) -> SinkSpectra:
    """Measure sink mass, loss and both spectra on every text."""
    model, options = texts[0].model, {"engine": effort.engine, "checkpoint": effort.checkpoint}
    found = [_problem(text, way, token) for text in texts]
    masses = [sink_mass(model, text.batches, way) if reached else np.nan for text in found]
    how = {"num_probes": effort.num_probes, "num_steps": effort.num_steps, "seed": effort.seed}
    one = {"num_probes": 1, "num_steps": effort.ggn_steps, "seed": effort.seed}
    with changed_attention(model, way.change):
        losses = [text.loss_value() for text in found]
        own = [(x * effort.num_probes, text) for x, text in enumerate(found)]  # probes of each text
        hessians = [measure_lines(Hessian(text, **options), **how, first=first) for first, text in own]
        ggns = [measure_lines(GGN(text, **options), **one, first=first) for first, text in own]
    return SinkSpectra(np.array(masses), np.array(losses), stacked(hessians), stacked(ggns))


def measure_blocks(text: Problem, way: Intervention, token: int, effort: SinkEffort) -> SinkBlocks:
    """Measure λ_max of every group on one text."""
    H = Hessian(_problem(text, way, token), engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    names, values, errors = [], [], []
    how = {"num_probes": 1, "num_steps": effort.block_steps, "seed": effort.seed}
    with changed_attention(text.model, way.change):
        for name, globs in groups(text).items():
            ends = measure_lines(H.block(globs), **how).ends()
            names.append(name)
            values.append(ends.top[0])
            errors.append(ends.top_error[0])
    return SinkBlocks(names, np.array(values), np.array(errors))


def groups(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Return the groups that the model has, with the glob patterns that match."""
    blocks = [block.name for block in problem.space()]
    matching = {
        name: tuple(glob for glob in globs if fnmatch.filter(blocks, glob)) for name, globs in GROUPS.items()
    }
    return {name: globs for name, globs in matching.items() if globs}


def _problem(text: Problem, way: Intervention, token: int) -> Problem:
    batches = text.batches
    assert isinstance(batches, Batches)
    if not way.num_inserted:
        return text
    return Problem(text.model, way.batches(batches, token), text.loss, params=text.choice.params)


# ---------------------------------------------------------------------------------------------------- effects

Quantity = Literal["lambda_max", "lambda_min", "ggn_lambda_max", "bulk_width", "outliers", "stretch"]
QUANTITIES: dict[Quantity, str] = {
    "lambda_max": "λ_max of H",
    "bulk_width": "bulk width of H",
    "outliers": "outliers of H",
    "stretch": "stretch of H: λ_max / bulk width",
    "ggn_lambda_max": "λ_max of the GGN",
    "lambda_min": "λ_min of H",
}


class SinkEffect(NamedTuple):
    """Factors relative to the unchanged model."""

    texts: np.ndarray  # (X,)
    errors: np.ndarray  # (X,) relative: a factor lies within texts · exp(± error)
    mean: float  # geometric mean
    low: float  # ends of the 95 % interval over texts; nan for one text
    high: float

    @property
    def direction(self) -> int:
        """Direction on other texts: 1 for an increase, −1 for a decrease, 0 if the 95 % interval includes
        one.

        A single text has no such interval, so its direction is 0.
        """
        return int(self.low > 1) - int(self.high < 1)


def effect(result: Sinks, name: str, quantity: Quantity) -> SinkEffect:
    """Effect of an intervention at a strength, by the name of its measurement."""
    before, after = _logs(result, UNCHANGED, quantity), _logs(result, name, quantity)
    change = after[0] - before[0]  # (X, P), or (X, 1)
    errors = after[1] + before[1] + np.nan_to_num(half_width(change)) + _unsettled(result, name, quantity)
    errors = errors * (name != UNCHANGED)  # relative to itself, the unchanged model is exact
    logs = change.mean(1)
    mean, low, high = mean_interval(logs)
    return SinkEffect(np.exp(logs), errors, float(np.exp(mean)), float(np.exp(low)), float(np.exp(high)))


def thresholds(result: Sinks) -> np.ndarray:
    """Threshold τ of every text (X,): a share of the unchanged model's largest |λ|."""
    ends = result.moved[UNCHANGED].hessian.ends()
    return result.threshold * np.maximum(np.abs(ends.top), np.abs(ends.bottom))


def ends(result: Sinks, name: str) -> SpectrumEnds:
    """Ends of the spectrum of the Hessian."""
    return result.moved[name].hessian.ends()


def ggn_ends(result: Sinks, name: str) -> SpectrumEnds:
    """Ends of the spectrum of the GGN; a few steps do not resolve its lower end, zero."""
    return result.moved[name].ggn.ends()


def split(result: Sinks, name: str, *, earlier: int = 0) -> BulkSplit:
    """Bulk width and outliers of the Hessian, (X, P) each."""
    return result.moved[name].hessian.split(thresholds(result), earlier=earlier)


def _logs(result: Sinks, name: str, quantity: Quantity) -> tuple[np.ndarray, np.ndarray]:
    """Return logarithms (X, P) or (X, 1), and relative errors besides the noise of probes (X,)."""
    if quantity in ("bulk_width", "outliers"):
        found = _of_split(split(result, name), quantity)
        return np.log(found), np.zeros(len(found))
    if quantity == "stretch":
        top, error = _logs(result, name, "lambda_max")
        return top - _logs(result, name, "bulk_width")[0], error
    found = ggn_ends(result, name) if quantity == "ggn_lambda_max" else ends(result, name)
    lower = quantity == "lambda_min"
    values, errors = (-found.bottom, found.bottom_error) if lower else (found.top, found.top_error)
    with np.errstate(invalid="ignore", divide="ignore"):  # a missing end has no logarithm
        return np.log(values)[:, None], errors / np.abs(values)


def _of_split(found: BulkSplit, quantity: Quantity) -> np.ndarray:
    return found.width if quantity in ("bulk_width", "stretch") else found.outliers


def _unsettled(result: Sinks, name: str, quantity: Quantity) -> np.ndarray:
    """Change of bulk or outliers by the last Lanczos steps: (X,)."""
    if quantity not in ("bulk_width", "outliers", "stretch"):
        return np.zeros(len(result.moved[name].loss))
    changes = [
        np.log(_of_split(split(result, name, earlier=e), quantity))
        - np.log(_of_split(split(result, UNCHANGED, earlier=e), quantity))
        for e in (0, EARLIER)
    ]
    return np.abs(changes[0] - changes[1]).mean(1)
