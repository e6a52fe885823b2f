"""Spectra that are known exactly, for attention on scalars and two-layer networks, and their limits.

The study compares every eigenvalue in closed form with that of a dense Hessian, including degenerate cases.
Sweeps vary one quantity at a time. The study compares Gauss–Newton matrices of attention with those of MLPs
with the same number of parameters. It measures the pairing of eigenvalues from networks in which it is
exact up to the bundled model. Nothing is trained.

The ladder of pairing begins at networks with exact pairs and drops one assumption on each rung.

A rung has rows for quantities of the Hessian, the functional Hessian, or its part in queries and keys, over
random draws of weights and data. The loss is the squared error, with targets that are outputs plus normal
numbers; the last small network reads tokens and has cross-entropy.

The last rungs are parts of the bundled model, whose Hessians are too large for full matrices. Lanczos
gives the three largest eigenvalues of each sign; the full spectrum and exact pairs are unknown.

Sweeps of the exact spectrum of one-dimensional attention vary one quantity and fix all others.

Only norms and angle of w_Q and w_K matter, not their directions. Tokens and targets are independent normal
numbers; each seed uses the same draw at every value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import cos, prod, radians, sin
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import eigsh
from curvescope.closed_form.spectra import ExactSpectrum, attention_1d_outputs, attention_1d_spectrum
from curvescope.core.config import Config as Settings
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import Progress
from curvescope.core.result import Tabular
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.data.text import text_data
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import FunctionalHessian, Hessian
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown, Tables
from curvescope.studies.common.columns import columns_of, select_rows, stack_tables
from curvescope.studies.common.statistics import median_interval
from curvescope.studies.exact_spectra import analysis

CONTROL_NOTE = (
    "a random symmetric matrix is nearly paired, too: a pairing near 1 is not evidence of structure, "
    "but exact pairs are"
)


ALL, OUTLIERS, EXACT = "H", "outliers of H", "exact pairs of H"
FUNCTIONAL, EXACT_FUNCTIONAL = "H_f", "exact pairs of H_f"
QUERY_KEY, EXACT_QUERY_KEY = "H_f, queries and keys", "exact pairs of H_f, queries and keys"
QUANTITIES = (ALL, OUTLIERS, FUNCTIONAL, QUERY_KEY, EXACT, EXACT_FUNCTIONAL, EXACT_QUERY_KEY)
CONTROL = "control: random symmetric matrix"
LADDER_NUM_TOKENS, NUM_UNITS, VOCABULARY, HIDDEN = 8, 8, 8, 6
PLAIN: dict[str, Any] = {
    "n_layers": 1, "n_heads": 1, "n_ctx": LADDER_NUM_TOKENS, "causal": False, "norm": "none",
    "residual": False,
    "positions": "none", "bias_qkv": False, "bias_o": False, "bias_ff": False, "inputs": "continuous",
    "outputs": "regression", "d_ff": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Pairings(Tabular):
    """Table with one row per rung, quantity and draw."""

    rung: list[str]
    quantity: list[str]
    draw: np.ndarray
    value: np.ndarray  # nan if the rung does not have it

    def of(self, rung: str, quantity: str) -> np.ndarray:
        """Return the draws of one quantity of one rung."""
        return self.value[(np.array(self.rung) == rung) & (np.array(self.quantity) == quantity)]

    def table(self) -> Any:
        """Return one row per rung: the median of every quantity over draws and the ends of its interval."""
        rows = []
        for rung in dict.fromkeys(self.rung):
            row: dict[str, Any] = {"rung": rung, "draws": len(self.of(rung, self.quantity[0]))}
            for quantity in QUANTITIES:
                value, low, high = median_interval(self.of(rung, quantity))
                row |= {quantity: value, f"{quantity}, low": low, f"{quantity}, high": high}
            rows.append(row)
        return rows


class Drawn(NamedTuple):
    """Draws of a rung: outputs as a function of θ (R, n), their loss, θ, and a mask of queries and keys."""

    outputs: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor], Tensor]
    theta: Tensor
    query_key: Tensor  # (n,) bool


def rungs() -> dict[str, Callable[[int, int], Drawn]]:
    """Return every small network by name, as a function of the number of draws and the seed."""
    block = PLAIN | {"d_model": 4, "n_heads": 2, "d_head": 2}
    whole = block | {"residual": True, "norm": "pre", "d_ff": HIDDEN}
    tokens = {"inputs": "tokens", "outputs": "tokens", "vocab_size": VOCABULARY, "causal": True}
    return {
        "linear network": partial(_scalars, analysis.linear_network, 2 * NUM_UNITS, 0),
        "ReLU network": partial(_scalars, analysis.relu_network, 2 * NUM_UNITS, 0),
        "1-D attention": partial(_scalars, analysis.attend, 2 * NUM_UNITS + 1, 2 * NUM_UNITS),
        "two heads": partial(_scalars, partial(analysis.attend, heads=2), 4 * NUM_UNITS + 2, 4 * NUM_UNITS),
        "d = 2, d_K = 8, W_O": partial(_zoo, PLAIN | {"d_model": 2, "d_head": NUM_UNITS}),
        "d = d_K = 4": partial(_zoo, PLAIN | {"d_model": 4, "d_head": 4}),
        "d = 4, two heads": partial(_zoo, block),
        "+ skip": partial(_zoo, block | {"residual": True}),
        "+ norms": partial(_zoo, block | {"residual": True, "norm": "pre"}),
        "+ feed-forward": partial(_zoo, whole),
        "+ depth 2": partial(_zoo, whole | {"n_layers": 2}),
        "+ tokens, cross-entropy": partial(_zoo, whole | {"n_layers": 2} | tokens),
    }


def climb(rung: str, *, num_draws: int, seed: int) -> Pairings:
    """Measure all quantities of one rung, or of the control."""
    if rung == CONTROL:
        return _control(num_draws, seed)
    drawn = rungs()[rung](num_draws, seed)
    H, ggn = analysis.both_parts(drawn.outputs, drawn.loss, drawn.theta)
    values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    own = drawn.query_key
    parts = H - ggn, (H - ggn)[:, own][:, :, own]
    for spectrum in analysis.eigenvalues(H).numpy():
        values[ALL].append(analysis.pairing(spectrum))
        values[OUTLIERS].append(analysis.pairing(analysis.outliers(spectrum), ends=analysis.ENDS))
        values[EXACT].append(analysis.exactly_paired(spectrum))
    for part, name, exact in zip(
        parts, (FUNCTIONAL, QUERY_KEY), (EXACT_FUNCTIONAL, EXACT_QUERY_KEY), strict=True
    ):
        for spectrum in analysis.eigenvalues(part).numpy():
            values[name].append(analysis.pairing(spectrum))
            values[exact].append(analysis.exactly_paired(spectrum))
    return tagged(rung, values)


def tagged(rung: str, values: dict[str, list[float]]) -> Pairings:
    """Build the rows of one rung from its quantities over draws."""
    return Pairings(
        rung=[rung for each in values.values() for _ in each],
        quantity=[name for name, each in values.items() for _ in each],
        draw=np.concatenate([np.arange(len(each)) for each in values.values()]),
        value=np.concatenate([np.array(each, dtype=float) for each in values.values()]),
    )


def _control(num_draws: int, seed: int) -> Pairings:
    """Control with independent normal entries and as many rows as 1-D attention has parameters."""
    A = _normal(generator(seed, 4), num_draws, 2 * NUM_UNITS + 1, 2 * NUM_UNITS + 1)
    spectra = analysis.eigenvalues(A).numpy()
    values = {
        ALL: [analysis.pairing(one) for one in spectra],
        OUTLIERS: [analysis.pairing(analysis.outliers(one), ends=analysis.ENDS) for one in spectra],
        EXACT: [analysis.exactly_paired(one) for one in spectra],
    }
    return tagged(CONTROL, values)


def _scalars(
    network: Callable[[Tensor, Tensor], Tensor], n: int, num_query_key: int, num_draws: int, seed: int
) -> Drawn:
    """Draws of a network on scalars, whose first weights are queries and keys."""
    source = generator(seed, 5)
    theta, x = _normal(source, num_draws, n), _normal(source, num_draws, LADDER_NUM_TOKENS)

    def outputs(theta: Tensor) -> Tensor:
        return network(theta, x)

    y = outputs(theta) + _normal(source, num_draws, LADDER_NUM_TOKENS)
    return Drawn(outputs, partial(analysis.squared_error, y=y), theta, torch.arange(n) < num_query_key)


def _zoo(settings: dict[str, Any], num_draws: int, seed: int) -> Drawn:
    """Draws of a zoo Transformer with weights of standard deviation 1/√rows and norms with scale one."""
    source, module = generator(seed, 6), Transformer(TransformerConfig(**settings)).double()
    shapes = {name: p.shape for name, p in module.named_parameters()}
    theta = torch.cat(
        [_ladder_weights(source, name, shape, num_draws) for name, shape in shapes.items()], dim=1
    )
    tokens = settings["inputs"] == "tokens"
    x = (
        torch.randint(VOCABULARY, (num_draws, 1, LADDER_NUM_TOKENS), generator=source)
        if tokens
        else _normal(source, num_draws, 1, LADDER_NUM_TOKENS, settings["d_model"])
    )

    def outputs(theta: Tensor) -> Tensor:
        pieces = theta.split([prod(shape) for shape in shapes.values()], dim=1)
        own = {name: piece.view(-1, *shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        run = torch.func.vmap(lambda weights, x: torch.func.functional_call(module, weights, (x,)))
        return run(own, x).flatten(1)

    f = outputs(theta)
    loss = (
        partial(
            _next_token, labels=torch.randint(VOCABULARY, (num_draws, LADDER_NUM_TOKENS), generator=source)
        )
        if tokens
        else partial(analysis.squared_error, y=f + _normal(source, *f.shape))
    )
    own = [torch.full((prod(shape),), name.endswith(("W_Q", "W_K"))) for name, shape in shapes.items()]
    return Drawn(outputs, loss, theta, torch.cat(own))


def _ladder_weights(source: torch.Generator, name: str, shape: torch.Size, num_draws: int) -> Tensor:
    """Random values of a parameter: (R, entries)."""
    if len(shape) == 1:
        return torch.full((num_draws, prod(shape)), 1.0 if name.endswith(".g") else 0.0).double()
    return _normal(source, num_draws, prod(shape)) / (1.0 if name == "E" else shape[0] ** 0.5)


def _next_token(f: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (R, T V) and labels (R, T)."""
    logits = f.view(*labels.shape, VOCABULARY)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape).mean(1)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- bundled

NAME, SEQUENCE = "tiny-gpt", 32
PARTS = {"one head's W_Q, W_K": "L1.h0.W_[QK]", "one layer": "L1.*"}
REVISIONS = ("initial", "final")
TOLERANCE = 1e-2  # residual / largest eigenvalue; the error of values is its square


def rung_name(revision: str, part: str) -> str:
    """Name of a rung in tables."""
    return f"{NAME} ({revision}), {part}"


def bundled(revision: str, num_tokens: int) -> tuple[Model, Batches]:
    """Load the bundled model at a revision, and a part of the sample text."""
    model = load(NAME, revision=revision)
    return model, text_data("sample", model, tokens=num_tokens, seq_len=SEQUENCE)


def climb_bundled(revision: str, part: str, *, num_tokens: int, seed: int) -> Pairings:
    """Measure the pairing of outliers of the Hessian and functional Hessian, for one part of the model."""
    problem = Problem(*bundled(revision, num_tokens))
    values = {OUTLIERS: [_ends(Hessian(problem, PARTS[part]), seed)]}
    if part.endswith("W_K"):
        values[QUERY_KEY] = [_ends(FunctionalHessian(problem, PARTS[part]), seed)]
    return tagged(rung_name(revision, part), values)


def _ends(op: LinearOperator, seed: int) -> float:
    found = eigsh(op, 2 * analysis.ENDS, which="BE", vectors=False, seed=seed, tol=TOLERANCE)
    return analysis.pairing(found.values, ends=analysis.ENDS) if found.converged else np.nan


# ----------------------------------------------------------------------------------------------------- sweeps

NORM_Q, NORM_K, BOTH, ANGLE = "‖w_Q‖", "‖w_K‖", "‖w_Q‖ = ‖w_K‖", "angle"
VALUE, LENGTH, TARGET, OUTLIER = "w_V", "length", "targets", "outlier token"
BIAS, LARGE_BIAS = "first-token bias", "first-token bias, large first token"
LARGE = 4.0  # size of a large first token


class SweepPoint(NamedTuple):
    """Quantities of a sweep, with their fixed values as defaults."""

    norm_Q: float = 2.0
    norm_K: float = 2.0
    angle: float = 60.0  # degrees between w_Q and w_K
    w_V: float = 1.0
    length: int = 16
    target: float = 1.0  # standard deviation of the targets
    outlier: float = 1.0  # factor of the second token
    bias: float = 0.0  # added to the scores of the first token
    first: float | None = None  # value of the first token; random if None


AXES: dict[str, tuple[str, ...]] = {
    NORM_Q: ("norm_Q",),
    NORM_K: ("norm_K",),
    BOTH: ("norm_Q", "norm_K"),
    ANGLE: ("angle",),
    VALUE: ("w_V",),
    LENGTH: ("length",),
    TARGET: ("target",),
    OUTLIER: ("outlier",),
    BIAS: ("bias",),
    LARGE_BIAS: ("bias",),
}
VALUES: dict[str, tuple[float, ...]] = {
    NORM_Q: tuple(np.geomspace(0.02, 200, 13)),
    NORM_K: tuple(np.geomspace(0.02, 200, 13)),
    BOTH: tuple(np.geomspace(0.02, 20, 13)),
    ANGLE: tuple(np.linspace(0, 180, 13)),
    VALUE: tuple(np.geomspace(0.01, 100, 13)),
    LENGTH: (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128),
    TARGET: tuple(np.geomspace(0.01, 100, 13)),
    OUTLIER: tuple(np.geomspace(1, 100, 13)),
    BIAS: tuple(np.linspace(0, 12, 13)),
    LARGE_BIAS: tuple(np.linspace(0, 12, 13)),
}


@dataclass(frozen=True)
class Sweeps(Tabular):
    """Table with one row per value of the varied quantity and draw of tokens and targets."""

    varied: list[str]
    value: np.ndarray
    seed: np.ndarray
    bulk: np.ndarray  # |b|
    outlier_low: np.ndarray
    outlier_mid: np.ndarray
    outlier_high: np.ndarray
    ggn_lambda_max: np.ndarray
    condition: np.ndarray  # max |λ| / min |λ| over nonzero eigenvalues
    pairing: np.ndarray  # pairing of the three outliers
    first_mass: np.ndarray  # mean attention on the first token
    loss: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """Largest |outlier|."""
        return np.maximum(np.abs(self.outlier_low), np.abs(self.outlier_high))

    def of(self, varied: str) -> Sweeps:
        """Return the rows of one varied quantity."""
        return select_rows(self, np.array(self.varied) == varied)

    def medians(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of the varied quantity, and the median of a column over seeds at each."""
        column, values = getattr(self, name), np.unique(self.value)
        return values, np.array([np.median(column[self.value == one]) for one in values])

    def table(self) -> Any:
        """Return one row per value and seed."""
        return columns_of(self)


def sweep(varied: str, *, d_K: int, seeds: range) -> Sweeps:
    """Vary one quantity over its values, for each seed."""
    rows = []
    for value in VALUES[varied]:
        one = SweepPoint(first=LARGE if varied == LARGE_BIAS else None)
        one = one._replace(**dict.fromkeys(AXES[varied], value))
        rows += [(value, seed, *_measured(one, d_K, seed)) for seed in seeds]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Sweeps([varied] * len(rows), *columns)


def _measured(one: SweepPoint, d_K: int, seed: int) -> tuple[float, ...]:
    """Return the columns of one row, after value and seed."""
    source, L = generator(seed, 2), int(one.length)
    x, y = (torch.randn(128, generator=source, dtype=torch.float64)[:L] for _ in range(2))
    x = x * torch.where(torch.arange(L) == 1, one.outlier, 1.0)
    x = x if one.first is None else torch.where(torch.arange(L) == 0, one.first, x)
    w_Q, w_K, w_V = _sweep_weights(one, d_K)
    bias = torch.where(torch.arange(L) == 0, one.bias, 0.0).double()
    f = attention_1d_outputs(x, w_Q, w_K, w_V, score_bias=bias)
    H, ggn = (
        attention_1d_spectrum(x, w_Q, w_K, w_V, targets=one.target * y, score_bias=bias, part=part)
        for part in ("hessian", "ggn")
    )
    scores = (w_Q @ w_K) / d_K**0.5 * torch.outer(x, x) + bias
    mass = float(torch.softmax(scores, 1)[:, 0].mean())
    return (*_of_spectrum(H, ggn), mass, float((f - one.target * y).square().mean()))


def _of_spectrum(H: ExactSpectrum, ggn: ExactSpectrum) -> tuple[float, ...]:
    values = (abs(H.bulk[0]), *H.outliers, ggn.eigenvalues[-1])
    return (*map(float, values), analysis.condition_number(H.eigenvalues), analysis.pairing(H.outliers))


def _sweep_weights(one: SweepPoint, d_K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return w_Q along the first axis and w_K at an angle in the plane of the first two axes."""
    w_Q, w_K = torch.zeros(2, d_K, dtype=torch.float64)
    w_Q[0] = one.norm_Q
    w_K[0], w_K[1] = one.norm_K * cos(radians(one.angle)), one.norm_K * sin(radians(one.angle))
    return w_Q, w_K, w_Q.new_tensor([one.w_V])


MOST_UNITS = 200  # largest d_K, because Hessians are full matrices
STUDY_NUM_TOKENS = 8  # number of tokens of the cases


@dataclass(frozen=True)
class Config(Settings):
    """Sizes and numbers of draws. The defaults take under a minute on a CPU."""

    head_size: int = setting(8, "d_K of attention, and neurons of the two-layer networks", least=2)
    num_seeds: int = setting(8, "draws of tokens and targets at every value of a sweep", least=2)
    num_draws: int = setting(
        40, "draws of weights and data for the comparison of λ_max of H and the GGN", least=2
    )
    num_rung_draws: int = setting(16, "draws of weights and data on every rung of the pairing", least=2)
    bundled_tokens: int = setting(
        64, "tokens of the sample text for the rungs of the bundled model; 0 omits them", least=0
    )
    seed: int = setting(0, "seed of the first draw; the others use the next seeds")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size > MOST_UNITS:
            raise UsageError(f"head_size: expected at most {MOST_UNITS}, got {self.head_size}")
        if 0 < self.bundled_tokens < SEQUENCE:
            raise UsageError(f"bundled_tokens: expected 0 or at least {SEQUENCE}, got {self.bundled_tokens}")


@dataclass(frozen=True)
class ExactSpectra(Shown):
    """Exact spectra, sweeps, gaps of the GGN, and pairing."""

    spectra: analysis.Compared
    sweeps: Sweeps
    gaps: analysis.Gaps
    pairings: Pairings

    def tables(self) -> Tables:
        """Return every eigenvalue, the agreement of each case, sweeps, gaps of λ_max, and pairing."""
        import pandas as pd

        return {
            "spectra": self.spectra.to_frame(),
            "agreement": pd.DataFrame(self.spectra.errors().items(), columns=["case", "error"]),
            "sweeps": self.sweeps.to_frame(),
            "ggn_gap": self.gaps.to_frame(),
            "pairing": self.pairings.to_frame(),
        }


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ExactSpectra:
    """Compute all pieces that `state` does not contain."""
    first = [
        Piece("spectra", partial(analysis.compare, cfg.seed, d_K=cfg.head_size, num_tokens=STUDY_NUM_TOKENS))
    ]
    seeds = range(cfg.seed, cfg.seed + cfg.num_seeds)
    moved = [
        Piece(f"sweep of {name}", partial(sweep, name, d_K=cfg.head_size, seeds=seeds), kind="sweeps")
        for name in AXES
    ]
    gaps = [
        Piece(
            f"λ_max of the GGN, {match}",
            partial(analysis.measure_all, match, num_draws=cfg.num_draws, seed=cfg.seed),
        )
        for match in analysis.MATCHES
    ]
    rungs = _rungs(cfg)
    found = work_through(
        [*first, *moved, *gaps, *rungs], contents=_contents(cfg), progress=progress, state=state
    )
    return ExactSpectra(
        spectra=found.take(analysis.Compared, first[0].name),
        sweeps=stack_tables(found.take(Sweeps, piece.name) for piece in moved),
        gaps=stack_tables(found.take(analysis.Gaps, piece.name) for piece in gaps),
        pairings=stack_tables(found.take(Pairings, piece.name) for piece in rungs),
        notes=[CONTROL_NOTE],
    )


def _rungs(cfg: Config) -> list[Piece]:
    """Return the pieces for small networks, the control, and parts of the bundled model."""
    small = [
        Piece(f"pairing, {name}", partial(climb, name, num_draws=cfg.num_rung_draws, seed=cfg.seed))
        for name in (CONTROL, *rungs())
    ]
    if not cfg.bundled_tokens:
        return small
    real = [
        Piece(
            f"pairing, {rung_name(revision, part)}",
            partial(climb_bundled, revision, part, num_tokens=cfg.bundled_tokens, seed=cfg.seed),
        )
        for revision in REVISIONS
        for part in PARTS
    ]
    return small + real


def _contents(cfg: Config) -> str:
    """Fingerprint of the bundled model and the sample, if they are used."""
    if not cfg.bundled_tokens:
        return ""
    used = [bundled(revision, cfg.bundled_tokens) for revision in REVISIONS]
    return fingerprint(*(part for both in used for part in both))
