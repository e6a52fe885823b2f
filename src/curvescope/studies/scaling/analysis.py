"""Power laws q ∝ xᵅ over a grid of trained models, with tests of whether the grid supports a law.

With x the variable (parameters N or tokens D) and z the other variable, the line

    log q = c_z + α log x

has its own constant for every z, so that α describes the effect of x at fixed z. A law is supported if

- α is not zero: F-test against the constants alone, p < 5 %;
- the line is not bent: F-test of a further term γ (log x)², p ≥ 5 %;
- α does not depend on z: F-test of a further term log x · log z, p ≥ 5 %;
- the residuals are small: their root mean square is at most RESIDUAL, in units of log q;

and if there are at least three values of x, because two points always lie on a line. The interval of α comes
from a bootstrap that draws cells with replacement, and seeds within each cell.

The sample size for a tolerance comes from an exact law that needs only a variance, no Hessian and no
exponent.

With L_k the mean loss of k independent samples at fixed weights, L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k + 1), so

    E (L_{k+1} − L_k)² = Var ℓ / (k (k + 1))

for every model and every k. The least k with root mean square at most τ is about √Var / τ. The variance comes
from held-out samples. Fresh samples check k; each is used in one difference only.

One cell of the grid is a Transformer that is trained on its own data, and whose losses and curvature are
measured. Cells share only the language. Weights, training data, held-out data and probes of each cell have
their own random streams, so that cells and seeds are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.algorithms.estimates.intervals import positive_interval
from curvescope.closed_form.landscape import samples_for
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.data.tasks.random_sequences import markov, markov_transitions
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import GGN, FunctionalHessian, Hessian
from curvescope.problem import Problem
from curvescope.studies.common.columns import pick, probe_columns
from curvescope.studies.common.statistics import variance_interval
from curvescope.train import TrainConfig, train

if TYPE_CHECKING:
    from curvescope.studies.scaling.study import Config

LEVEL = 0.05  # significance level of all tests
RESIDUAL = 0.3  # in units of log q: a factor of 1.35
FEWEST = 3  # least number of values of a variable that can contradict a line


@dataclass(frozen=True)
class PowerLaw(Result):
    """Exponent with 95 % interval and tests; nan if no fit was possible."""

    quantity: str
    variable: str
    exponent: float
    low: float
    high: float
    residual: float  # root mean square, in units of log q
    p_constant: float  # p-value of α = 0
    p_bend: float  # p-value of γ = 0
    p_other: float  # p-value of an α that is independent of the other variable
    first: float  # exponent between the two smallest values of x
    last: float  # exponent between the two largest values of x
    supported: bool
    words: str


def fit_law(
    quantity: str,
    variable: str,
    x: np.ndarray,
    z: np.ndarray,
    q: np.ndarray,
    *,
    draws: int = 1000,
    seed: int = 0,
) -> PowerLaw:
    """Fit the law of q (R,) over x at fixed z, from one row per cell and seed."""
    if not (np.isfinite(q).all() and (q > 0).all()):
        return _no_law(quantity, variable, "some values are not positive, so no power law can be fitted")
    y, levels = np.log(q), np.unique(x)
    X, Z = (np.log(v) - np.log(v).mean() for v in (x, z))
    groups = (z[:, None] == np.unique(z)).astype(float)
    line = np.column_stack([groups, X])
    left, found = _fit(line, y)
    tests = _tests(groups, X, Z, y)
    residual = math.sqrt(left / max(len(y) - line.shape[1], 1))
    low, high = _bootstrap(X, groups, y, cells=_cells(x, z), draws=draws, seed=seed)
    first, last = (_slope(line, y, np.isin(x, some)) for some in (levels[:2], levels[-2:]))
    words = _words(variable, tests, residual, (first, last), levels=len(levels))
    numbers = float(found[-1]), low, high, residual, *tests, first, last
    return PowerLaw(quantity, variable, *numbers, supported=not words, words=words or "supported")


def _no_law(quantity: str, variable: str, words: str) -> PowerLaw:
    return PowerLaw(quantity, variable, *9 * [math.nan], supported=False, words=words)


def _tests(groups: np.ndarray, X: np.ndarray, Z: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return p-values of α = 0, of no bend, and of the same exponent for all z; nan if not testable."""
    line = np.column_stack([groups, X])
    left, degrees = _fit(line, y)[0], len(y) - line.shape[1]
    constant = _f_test(_fit(groups, y)[0], left, degrees)
    bend, other = (
        _f_test(left, _fit(np.column_stack([line, further]), y)[0], degrees - 1) for further in (X**2, X * Z)
    )
    enough, several = len(np.unique(X)) >= FEWEST, groups.shape[1] > 1
    return constant, bend if enough else math.nan, other if several else math.nan


def _fit(A: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the sum of squared residuals and the least-squares coefficients."""
    coefficients = np.linalg.lstsq(A, y, rcond=None)[0]
    return float(((y - A @ coefficients) ** 2).sum()), coefficients


def _slope(line: np.ndarray, y: np.ndarray, rows: np.ndarray) -> float:
    """Exponent fitted to some rows only."""
    return float(_fit(line[rows], y[rows])[1][-1])


def _f_test(less: float, more: float, degrees: int) -> float:
    """p-value of the F-test of one further term, from residual sums of squares without it and with it."""
    from scipy.special import fdtrc

    if degrees < 1:
        return math.nan
    if more <= 1e-24 * max(less, 1e-300):
        return 0.0 if less > more else 1.0
    return float(fdtrc(1, degrees, max(less - more, 0.0) / (more / degrees)))


def _cells(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Index of the cell of each row: (R,)."""
    return np.unique(np.column_stack([x, z]), axis=0, return_inverse=True)[1].reshape(-1)


def _bootstrap(
    X: np.ndarray, groups: np.ndarray, y: np.ndarray, *, cells: np.ndarray, draws: int, seed: int
) -> tuple[float, float]:
    """Return the ends of the 95 % interval of α: quantiles over draws of cells, and of seeds within them."""
    W = _weights(cells, draws, seed)  # (draws, R)
    total = W @ groups
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.nan_to_num((W * X) @ groups / total), np.nan_to_num((W * y) @ groups / total)
        dx, dy = X - means[0] @ groups.T, y - means[1] @ groups.T
        spread = (W * dx * dx).sum(axis=1)
        alpha = (W * dx * dy).sum(axis=1) / spread
    alpha = alpha[spread > 1e-12]
    if len(alpha) < draws / 2:
        return math.nan, math.nan
    low, high = np.quantile(alpha, [0.025, 0.975])
    return float(low), float(high)


def _weights(cells: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Count how often each row is drawn, (draws, R): cells with replacement, then rows of each cell."""
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    count = int(cells.max()) + 1
    times = source.multinomial(count, np.full(count, 1 / count), size=draws)  # (draws, cells)
    W = np.zeros((draws, len(cells)))
    for cell in range(count):
        rows = np.flatnonzero(cells == cell)
        W[:, rows] = source.multinomial(times[:, cell] * len(rows), np.full(len(rows), 1 / len(rows)))
    return W


def _words(
    variable: str,
    tests: tuple[float, float, float],
    residual: float,
    slopes: tuple[float, float],
    *,
    levels: int,
) -> str:
    """Explain why a law is not supported; return an empty text if it is."""
    constant, bend, other = tests
    reasons = []
    if levels < FEWEST:
        reasons.append(f"only {levels} values of {variable}, and two points always lie on a line")
    if not constant < LEVEL:
        reasons.append(f"not significantly different from a constant (p = {constant:.2g})")
    if bend < LEVEL:
        ends = f"from {slopes[0]:+.2f} to {slopes[1]:+.2f}"
        reasons.append(f"bent (p = {bend:.1g}): the exponent changes {ends} over the grid")
    if other < LEVEL:
        reasons.append(f"the exponent depends on the other variable (p = {other:.1g})")
    if residual > RESIDUAL:
        reasons.append(f"residual scatter of a factor of {math.exp(residual):.2f}")
    return "; ".join(reasons)


# ----------------------------------------------------------------------------------------------------- needed

FEWEST_ROUNDS = 8  # least number of differences for a check


@dataclass(frozen=True)
class NeededSamples(Result):
    """Sample size for a tolerance, its interval from the variance's, and a check on fresh samples."""

    tolerance: float
    variance: float  # of the loss of a single sample
    variance_low: float
    variance_high: float
    k: int
    k_low: int
    k_high: int
    rounds: int  # number of differences on fresh samples; 0: too few samples for a check
    rms: float  # root mean square of L_{k+1} − L_k over these differences
    rms_low: float
    rms_high: float

    @property
    def right(self) -> bool | None:
        """True if the interval of the rms on fresh samples reaches below the tolerance; None: unchecked."""
        return None if self.rounds == 0 else self.rms_low <= self.tolerance


def differences(fresh: np.ndarray, k: int) -> np.ndarray:
    """L_{k+1} − L_k for as many groups of k + 1 samples as `fresh` (n,) contains."""
    rounds = len(fresh) // (k + 1)
    groups = fresh[: rounds * (k + 1)].reshape(rounds, k + 1)
    return groups.mean(axis=1) - groups[:, :k].mean(axis=1)


def plan_data(held_out: np.ndarray, fresh: np.ndarray, *, tolerance: float) -> NeededSamples:
    """Compute k from the losses of held-out samples (n,), and check it on those of fresh samples (m,)."""
    variance, low, high = variance_interval(held_out)
    k = samples_for(variance, tolerance)
    rounds = len(fresh) // (k + 1)
    rounds = rounds if rounds >= FEWEST_ROUNDS else 0
    rms = _root_mean_square(differences(fresh, k)) if rounds else 3 * (math.nan,)
    ks = k, samples_for(low, tolerance), samples_for(high, tolerance)
    return NeededSamples(tolerance, variance, low, high, *ks, rounds, *rms)


def _root_mean_square(differences: np.ndarray) -> tuple[float, float, float]:
    squares = differences**2
    mean, stderr = squares.mean(), squares.std(ddof=1) / math.sqrt(len(squares))
    low, high = positive_interval(np.asarray(mean), np.asarray(stderr), len(squares) - 1)
    return math.sqrt(mean), math.sqrt(low), math.sqrt(high)


# ------------------------------------------------------------------------------------------------------- cell

LENGTH, VOCAB = 16, 16  # sequence length, and number of symbols of the language
AT_ONCE = 512  # sequences per batch when losses are computed


class CellPosition(NamedTuple):
    """Position of a cell in the grid."""

    width: int
    sequences: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the cell's piece of work."""
        return f"cell.d{self.width}.n{self.sequences}.s{self.seed}"


@dataclass(frozen=True)
class GridCell(Result):
    """Measurements of one trained model."""

    width: int
    sequences: int
    seed: int
    num_parameters: int
    train_loss: float  # mean over the training data
    held_out_loss: float
    held_out_stderr: float  # over held-out sequences
    excess: float  # held-out loss minus the loss of the true language model on the same sequences
    excess_stderr: float
    gradient_norm: float  # gradient of the loss whose curvature is measured
    hessian: OwnProbes
    ggn: OwnProbes
    functional: OwnProbes  # H − H_o
    needed: NeededSamples

    @property
    def tokens(self) -> int:
        """Number of targets in the training data."""
        return self.sequences * LENGTH

    def ends(self) -> tuple[float, float, float, float]:
        """λ_max of H, its error, λ_min of H, its error; an eigenvalue lies within each error."""
        found = self.hessian.ends
        assert found is not None
        (low, high), (low_error, high_error) = found.values, found.residuals
        return float(high), float(high_error), float(low), float(low_error)

    def top(self) -> tuple[float, float]:
        """λ_max of the GGN and its error."""
        ritz = self.ggn.ends
        assert ritz is not None
        return float(ritz.values[1]), float(ritz.residuals[1])

    def rank(self) -> tuple[float, float]:
        """Effective rank tr² / ‖·‖_F² of the GGN and its error: as many equal eigenvalues fit both."""
        trace, norm = self.ggn.trace, self.ggn.norm
        value = (trace / norm) ** 2
        parts = (self.ggn.trace_stderr / trace, self.ggn.norm_stderr / norm)
        return value, 2 * value * math.hypot(*parts)

    def gap(self) -> tuple[float, float]:
        """‖H − H_o‖_F / ‖H‖_F and its error."""
        value = self.functional.norm / self.hessian.norm
        parts = (
            self.functional.norm_stderr / self.functional.norm,
            self.hessian.norm_stderr / self.hessian.norm,
        )
        return value, value * math.hypot(*parts)


def measure_cell(cfg: Config, place: CellPosition) -> GridCell:
    """Train the model of a cell and measure it."""
    weights, data, held_out, fresh, probes = _streams(cfg, place)
    sample = _sample(cfg, place.sequences, data)
    model = _trained(cfg, place, sample, seed=weights)
    test = _sample(cfg, cfg.held_out, held_out)
    others = _losses(model, test)
    excess = others - _least_losses(cfg, test)
    new = _losses(model, _sample(cfg, cfg.fresh, fresh))
    problem = Problem(model, _measured(cfg, sample, held_out))
    measured = partial(own_probes, num_probes=cfg.num_probes, max_exact=cfg.max_exact, seed=probes)
    few = max(1, cfg.num_steps // 3)
    return GridCell(
        width=place.width,
        sequences=place.sequences,
        seed=place.seed,
        num_parameters=model.num_parameters,
        train_loss=float(_losses(model, sample).mean()),
        held_out_loss=float(others.mean()),
        held_out_stderr=_stderr(others),
        excess=float(excess.mean()),
        excess_stderr=_stderr(excess),
        gradient_norm=float(problem.gradient().norm()),
        hessian=measured(Hessian(problem), num_steps=cfg.num_steps),
        ggn=measured(GGN(problem), num_steps=few),
        functional=measured(FunctionalHessian(problem), num_steps=few),
        needed=plan_data(others, new, tolerance=cfg.tolerance),
    )


def _stderr(samples: np.ndarray) -> float:
    return float(samples.std(ddof=1) / math.sqrt(len(samples)))


def _streams(cfg: Config, place: CellPosition) -> list[int]:
    """Random seeds of weights, training data, held-out data, fresh data and probes."""
    source = np.random.SeedSequence([cfg.seed & 0xFFFFFFFF, *place])
    return [int(seed) for seed in source.generate_state(5)]


def _sample(cfg: Config, count: int, seed: int) -> Batches:
    """Draw sequences of the language."""
    size = min(cfg.batch_size, count)
    return markov(
        num_sequences=count, length=LENGTH, vocab=VOCAB, seed=cfg.seed, sample_seed=seed, batch_size=size
    )


def _measured(cfg: Config, sample: Batches, held_out: int) -> Batches:
    """Return the data of the Hessian in one batch: the first training sequences, or held-out ones."""
    chosen = sample if cfg.curvature_on == "train" else _sample(cfg, cfg.measured, held_out)
    inputs, targets = _whole(chosen)
    return Batches.from_tensors(inputs[: cfg.measured], targets[: cfg.measured], name="markov")


def _trained(cfg: Config, place: CellPosition, sample: Batches, *, seed: int) -> Model:
    shape = TransformerConfig(
        n_layers=cfg.size.layers,
        d_model=place.width,
        n_heads=cfg.size.heads,
        n_ctx=LENGTH,
        vocab_size=VOCAB,
        seed=seed,
    )
    model = load(Transformer(shape), dtype="float32", device=cfg.device)
    steps = cfg.num_train_steps
    options = TrainConfig(steps=steps, lr=cfg.lr, warmup=min(50, steps // 4), weight_decay=cfg.weight_decay)
    return train(model, sample, options)[0]


def _whole(sample: Batches) -> tuple[Tensor, Tensor]:
    """Concatenate inputs and targets of all batches."""
    inputs = torch.cat([batch.inputs for batch in sample])  # pyright: ignore[reportCallIssue, reportArgumentType]
    return inputs, torch.cat([batch.targets for batch in sample])


def _least_losses(cfg: Config, sample: Batches) -> np.ndarray:
    """Mean loss of each sequence under the language's true probabilities: (n,)."""
    inputs, targets = _whole(sample)
    P = markov_transitions(VOCAB, seed=cfg.seed)
    return -P[inputs, targets].log().mean(dim=1).numpy()


@torch.no_grad()
def _losses(model: Model, sample: Batches) -> np.ndarray:
    """Mean loss of each sequence: (n,)."""
    pairs = zip(*(whole.split(AT_ONCE) for whole in _whole(sample)), strict=True)
    return torch.cat([_sequence_losses(model, x, y) for x, y in pairs]).double().cpu().numpy()


def _sequence_losses(model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model.evaluate(inputs)
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="none"
    )
    return flat.reshape(targets.shape).mean(dim=1)


# ------------------------------------------------------------------------------------------------- quantities


class CellQuantity(NamedTuple):
    """A positive number of a cell, with its symbol."""

    symbol: str
    of: Callable[[GridCell], tuple[float, float]]  # value and error


def _spread(cell: GridCell) -> tuple[float, float]:
    """λ_max over the mean eigenvalue of the GGN, a lower bound of the condition number."""
    top, error = cell.top()
    mean = cell.ggn.trace / cell.num_parameters
    value = top / mean
    return value, value * (error / top + cell.ggn.trace_stderr / cell.ggn.trace)


def _of_top(cell: GridCell) -> tuple[float, float]:
    """tr / λ_max of the GGN."""
    value, error = _spread(cell)
    return cell.num_parameters / value, cell.num_parameters / value * error / value


QUANTITIES = {
    "excess_loss": CellQuantity("L − L*", lambda c: (c.excess, c.excess_stderr)),
    "lambda_max": CellQuantity("λ_max", lambda c: c.ends()[:2]),
    "minus_lambda_min": CellQuantity("−λ_min", lambda c: (-c.ends()[2], c.ends()[3])),
    "trace": CellQuantity("tr H", lambda c: (c.hessian.trace, c.hessian.trace_stderr)),
    "frobenius": CellQuantity("‖H‖_F", lambda c: (c.hessian.norm, c.hessian.norm_stderr)),
    "effective_rank": CellQuantity("tr²/‖GGN‖_F²", GridCell.rank),
    "trace_over_top": CellQuantity("tr/λ_max, GGN", _of_top),
    "spread": CellQuantity("n λ_max/tr, GGN", _spread),
    "gap": CellQuantity("‖H − H_o‖_F/‖H‖_F", GridCell.gap),
    "gradient_squared": CellQuantity("‖∇L‖²", lambda c: (c.gradient_norm**2, 0.0)),
}
VARIABLES = {"N": "parameters", "D": "tokens"}


def row(cell: GridCell) -> dict[str, Any]:
    """Return the table row of a cell, with all its numbers."""
    h, g, needed = cell.hessian, cell.ggn, cell.needed
    top, top_error, low, low_error = cell.ends()
    numbers: dict[str, Any] = {
        "width": cell.width, "parameters": cell.num_parameters, "sequences": cell.sequences,
        "tokens": cell.tokens, "seed": cell.seed, "train_loss": cell.train_loss,
        "held_out_loss": cell.held_out_loss, "held_out_loss_stderr": cell.held_out_stderr,
        "excess_loss": cell.excess, "excess_loss_stderr": cell.excess_stderr,
        "lambda_max": top, "lambda_max_error": top_error, "lambda_max_high": h.ends.high if h.ends else top,
        "lambda_min": low, "lambda_min_error": low_error, "lambda_min_low": h.ends.low if h.ends else low,
        **probe_columns(h),
        "ggn_trace": g.trace, "ggn_trace_stderr": g.trace_stderr,
        "ggn_frobenius": g.norm, "ggn_frobenius_stderr": g.norm_stderr,
        "ggn_lambda_max": cell.top()[0], "ggn_lambda_max_error": cell.top()[1],
    }  # fmt: skip
    for name in ("effective_rank", "trace_over_top", "spread", "gap"):
        numbers[name], numbers[f"{name}_stderr"] = QUANTITIES[name].of(cell)
    numbers["gradient_norm"] = cell.gradient_norm
    numbers |= pick(needed, "variance", "variance_low", "variance_high", "tolerance", "k", "k_low", "k_high")
    checked = pick(needed, "rms", "rms_low", "rms_high")
    return numbers | {f"checked_{name}": value for name, value in checked.items()} | {"exact": h.exact}
