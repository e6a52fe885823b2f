"""Power laws q ∝ xᵅ over a grid, and whether the grid supports one at all.

With x the variable (parameters N or tokens D) and z the other one, the line

    log q = c_z + α log x

has a constant of its own for every z, so that α says what x does at fixed z. A law is supported if

- α is not zero: F-test against the constants alone, p < 5 %;
- the line is not bent: F-test of a further term γ (log x)², p ≥ 5 %;
- α does not depend on z: F-test of a further term log x · log z, p ≥ 5 %;
- what is left over is small: root mean square of the residuals at most RESIDUAL, in units of log q;

and there are at least three values of x, since two of them lie on a line whatever the truth is. The interval
of α is that of the bootstrap: cells are drawn with replacement, and seeds within each of them.

How many samples a tolerance needs, by the law that is exact: no Hessian, no exponent, one variance.

With L_k the mean loss of k independent samples at fixed weights, L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k + 1), so

    E (L_{k+1} − L_k)² = Var ℓ / (k (k + 1)),

for every model and every k. The least k that keeps its root within τ is about √Var / τ. Here the variance is
taken from held-out samples, and k is checked on fresh ones: differences of their own, none used twice.

One cell of the grid: a Transformer is trained on its own data, and its losses and curvature are measured.

Nothing is shared between cells but the language: weights, training data, held-out data and probes of each
cell come from streams of their own, so that cells and seeds are independent.
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
from curvescope.studies.common.statistics import variance_interval
from curvescope.train import TrainConfig, train

if TYPE_CHECKING:
    from curvescope.studies.scaling.study import Config

LEVEL = 0.05  # of all tests
RESIDUAL = 0.3  # a factor of 1.35
FEWEST = 3  # values of a variable that can contradict a line


@dataclass(frozen=True)
class Law(Result):
    """An exponent, its 95 % interval, and the tests; nan where a fit was not possible."""

    quantity: str
    variable: str
    exponent: float
    low: float
    high: float
    residual: float  # root mean square, of log q
    p_constant: float  # of data like these if α were zero
    p_bend: float  # if γ were zero
    p_other: float  # if α did not depend on the other variable
    first: float  # the exponent between the two least values of x
    last: float  # and between the two largest
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
) -> Law:
    """The law of q (R,) over x at fixed z, from one row per cell and seed."""
    if not (np.isfinite(q).all() and (q > 0).all()):
        return _no_law(quantity, variable, "not positive everywhere: no power law can be fitted")
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
    return Law(
        quantity=quantity,
        variable=variable,
        exponent=float(found[-1]),
        low=low,
        high=high,
        residual=residual,
        p_constant=tests[0],
        p_bend=tests[1],
        p_other=tests[2],
        first=first,
        last=last,
        supported=not words,
        words=words or "supported",
    )


def _no_law(quantity: str, variable: str, words: str) -> Law:
    nan = math.nan
    return Law(quantity, variable, nan, nan, nan, nan, nan, nan, nan, nan, nan, supported=False, words=words)


def _tests(groups: np.ndarray, X: np.ndarray, Z: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """p of a constant, of no bend, and of an exponent that is the same for all z; nan where not testable."""
    line = np.column_stack([groups, X])
    left, degrees = _fit(line, y)[0], len(y) - line.shape[1]
    constant = _f_test(_fit(groups, y)[0], left, degrees)
    bend, other = (
        _f_test(left, _fit(np.column_stack([line, further]), y)[0], degrees - 1) for further in (X**2, X * Z)
    )
    enough, several = len(np.unique(X)) >= FEWEST, groups.shape[1] > 1
    return constant, bend if enough else math.nan, other if several else math.nan


def _fit(A: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum of squared residuals and the coefficients of least squares."""
    found = np.linalg.lstsq(A, y, rcond=None)[0]
    return float(((y - A @ found) ** 2).sum()), found


def _slope(line: np.ndarray, y: np.ndarray, rows: np.ndarray) -> float:
    """The exponent of some rows alone."""
    return float(_fit(line[rows], y[rows])[1][-1])


def _f_test(less: float, more: float, degrees: int) -> float:
    """p of the F-test of one further term: residual sums of squares without it and with it."""
    from scipy.special import fdtrc

    if degrees < 1:
        return math.nan
    if more <= 1e-24 * max(less, 1e-300):
        return 0.0 if less > more else 1.0
    return float(fdtrc(1, degrees, max(less - more, 0.0) / (more / degrees)))


def _cells(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The number of the cell of each row, (R,)."""
    return np.unique(np.column_stack([x, z]), axis=0, return_inverse=True)[1].reshape(-1)


def _bootstrap(
    X: np.ndarray, groups: np.ndarray, y: np.ndarray, *, cells: np.ndarray, draws: int, seed: int
) -> tuple[float, float]:
    """Ends of the 95 % interval of α: quantiles over draws of cells, and of seeds within them."""
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
    """How often each row is drawn, (draws, R): cells with replacement, then rows of each cell."""
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
    """Why a law is not supported; empty if it is."""
    constant, bend, other = tests
    found = []
    if levels < FEWEST:
        found.append(f"only {levels} values of {variable}: any two points lie on a line")
    if not constant < LEVEL:
        found.append(f"not told from a constant (p = {constant:.2g})")
    if bend < LEVEL:
        ends = f"from {slopes[0]:+.2f} to {slopes[1]:+.2f}"
        found.append(f"bent (p = {bend:.1g}): the exponent goes {ends} over the grid")
    if other < LEVEL:
        found.append(f"the exponent depends on the other variable (p = {other:.1g})")
    if residual > RESIDUAL:
        found.append(f"scatter of a factor of {math.exp(residual):.2f} around the line")
    return "; ".join(found)


# ----------------------------------------------------------------------------------------------------- needed

FEWEST_ROUNDS = 8  # differences that a check needs


@dataclass(frozen=True)
class Needed(Result):
    """The number of samples for a tolerance, with the interval that the variance leaves, and its check."""

    tolerance: float
    variance: float  # of the loss of one sample
    variance_low: float
    variance_high: float
    k: int
    k_low: int
    k_high: int
    rounds: int  # differences on fresh samples; 0: too few samples for a check
    rms: float  # of L_{k+1} − L_k over them
    rms_low: float
    rms_high: float

    @property
    def right(self) -> bool | None:
        """Whether fresh samples speak for the tolerance, not above it beyond doubt; None: not checked."""
        return None if self.rounds == 0 else self.rms_low <= self.tolerance


def differences(fresh: np.ndarray, k: int) -> np.ndarray:
    """L_{k+1} − L_k of as many groups of k + 1 samples as there are in `fresh` (n,)."""
    rounds = len(fresh) // (k + 1)
    groups = fresh[: rounds * (k + 1)].reshape(rounds, k + 1)
    return groups.mean(axis=1) - groups[:, :k].mean(axis=1)


def plan_data(held_out: np.ndarray, fresh: np.ndarray, *, tolerance: float) -> Needed:
    """k from the losses of held-out samples (n,), checked on those of fresh samples (m,)."""
    variance, low, high = variance_interval(held_out)
    k = samples_for(variance, tolerance)
    ends = {"k_low": samples_for(low, tolerance), "k_high": samples_for(high, tolerance)}
    rounds = len(fresh) // (k + 1)
    rounds = rounds if rounds >= FEWEST_ROUNDS else 0
    rms, bottom, top = _root_mean_square(differences(fresh, k)) if rounds else 3 * (math.nan,)
    return Needed(
        tolerance=tolerance,
        variance=variance,
        variance_low=low,
        variance_high=high,
        k=k,
        rounds=rounds,
        rms=rms,
        rms_low=bottom,
        rms_high=top,
        **ends,
    )


def _root_mean_square(found: np.ndarray) -> tuple[float, float, float]:
    squares = found**2
    mean, stderr = squares.mean(), squares.std(ddof=1) / math.sqrt(len(squares))
    low, high = positive_interval(np.asarray(mean), np.asarray(stderr), len(squares) - 1)
    return math.sqrt(mean), math.sqrt(low), math.sqrt(high)


# ------------------------------------------------------------------------------------------------------- cell

LENGTH, VOCAB = 16, 16  # of a sequence, and of the language
AT_ONCE = 512  # sequences that losses are taken of together


class Place(NamedTuple):
    """Where a cell is in the grid."""

    width: int
    sequences: int
    seed: int

    @property
    def name(self) -> str:
        """Of its piece of work."""
        return f"cell.d{self.width}.n{self.sequences}.s{self.seed}"


@dataclass(frozen=True)
class Cell(Result):
    """What was measured at the end of training."""

    width: int
    sequences: int
    seed: int
    num_parameters: int
    train_loss: float  # mean over the training data
    held_out_loss: float
    held_out_stderr: float  # over held-out sequences
    excess: float  # of the held-out loss over that of the language itself, on the same sequences
    excess_stderr: float
    gradient_norm: float  # of the loss whose curvature is measured
    hessian: OwnProbes
    ggn: OwnProbes
    functional: OwnProbes  # H − H_o
    needed: Needed

    @property
    def tokens(self) -> int:
        """Targets of the training data."""
        return self.sequences * LENGTH

    def ends(self) -> tuple[float, float, float, float]:
        """λ_max of H and its error, λ_min and its: an eigenvalue lies within."""
        found = self.hessian.ends
        assert found is not None
        (low, high), (low_error, high_error) = found.values, found.residuals
        return float(high), float(high_error), float(low), float(low_error)

    def top(self) -> tuple[float, float]:
        """λ_max of the GGN and its error."""
        found = self.ggn.ends
        assert found is not None
        return float(found.values[1]), float(found.residuals[1])

    def rank(self) -> tuple[float, float]:
        """tr² / ‖·‖_F² of the GGN: how many equal eigenvalues would have its trace and norm; its error."""
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


def measure_cell(cfg: Config, place: Place) -> Cell:
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
    return Cell(
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


def _streams(cfg: Config, place: Place) -> list[int]:
    """Seeds of weights, training data, held-out data, fresh data and probes."""
    source = np.random.SeedSequence([cfg.seed & 0xFFFFFFFF, *place])
    return [int(seed) for seed in source.generate_state(5)]


def _sample(cfg: Config, count: int, seed: int) -> Batches:
    """Sequences of the language."""
    size = min(cfg.batch_size, count)
    return markov(
        num_sequences=count, length=LENGTH, vocab=VOCAB, seed=cfg.seed, sample_seed=seed, batch_size=size
    )


def _measured(cfg: Config, sample: Batches, held_out: int) -> Batches:
    """The data of the Hessian: the first sequences trained on, or held-out ones, in one batch."""
    chosen = sample if cfg.curvature_on == "train" else _sample(cfg, cfg.measured, held_out)
    inputs, targets = _whole(chosen)
    return Batches.from_tensors(inputs[: cfg.measured], targets[: cfg.measured], name="markov")


def _trained(cfg: Config, place: Place, sample: Batches, *, seed: int) -> Model:
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
    """Inputs and targets of all batches."""
    inputs = torch.cat([batch.inputs for batch in sample])  # pyright: ignore[reportCallIssue, reportArgumentType]
    return inputs, torch.cat([batch.targets for batch in sample])


def _least_losses(cfg: Config, sample: Batches) -> np.ndarray:
    """The mean loss of each sequence under the language's own probabilities, (n,)."""
    inputs, targets = _whole(sample)
    P = markov_transitions(VOCAB, seed=cfg.seed)
    return -P[inputs, targets].log().mean(dim=1).numpy()


@torch.no_grad()
def _losses(model: Model, sample: Batches) -> np.ndarray:
    """The mean loss of each sequence, (n,)."""
    pairs = zip(*(whole.split(AT_ONCE) for whole in _whole(sample)), strict=True)
    return torch.cat([_sequence_losses(model, x, y) for x, y in pairs]).double().cpu().numpy()


def _sequence_losses(model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model.evaluate(inputs)
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="none"
    )
    return flat.reshape(targets.shape).mean(dim=1)


# ------------------------------------------------------------------------------------------------- quantities


class Quantity(NamedTuple):
    """A positive number of a cell."""

    symbol: str
    of: Callable[[Cell], tuple[float, float]]  # value and error


def _spread(cell: Cell) -> tuple[float, float]:
    """λ_max over the mean eigenvalue of the GGN: a condition number is at least that large."""
    top, error = cell.top()
    mean = cell.ggn.trace / cell.num_parameters
    value = top / mean
    return value, value * (error / top + cell.ggn.trace_stderr / cell.ggn.trace)


def _of_top(cell: Cell) -> tuple[float, float]:
    """tr / λ_max of the GGN."""
    value, error = _spread(cell)
    return cell.num_parameters / value, cell.num_parameters / value * error / value


QUANTITIES = {
    "excess_loss": Quantity("L − L*", lambda c: (c.excess, c.excess_stderr)),
    "lambda_max": Quantity("λ_max", lambda c: c.ends()[:2]),
    "minus_lambda_min": Quantity("−λ_min", lambda c: (-c.ends()[2], c.ends()[3])),
    "trace": Quantity("tr H", lambda c: (c.hessian.trace, c.hessian.trace_stderr)),
    "frobenius": Quantity("‖H‖_F", lambda c: (c.hessian.norm, c.hessian.norm_stderr)),
    "effective_rank": Quantity("tr²/‖GGN‖_F²", Cell.rank),
    "trace_over_top": Quantity("tr/λ_max, GGN", _of_top),
    "spread": Quantity("n λ_max/tr, GGN", _spread),
    "gap": Quantity("‖H − H_o‖_F/‖H‖_F", Cell.gap),
    "gradient_squared": Quantity("‖∇L‖²", lambda c: (c.gradient_norm**2, 0.0)),
}
VARIABLES = {"N": "parameters", "D": "tokens"}


def row(cell: Cell) -> dict[str, Any]:
    """Everything that is known about a cell, for the table."""
    h, g, needed = cell.hessian, cell.ggn, cell.needed
    top, top_error, low, low_error = cell.ends()
    found: dict[str, Any] = {
        "width": cell.width,
        "parameters": cell.num_parameters,
        "sequences": cell.sequences,
        "tokens": cell.tokens,
        "seed": cell.seed,
        "train_loss": cell.train_loss,
        "held_out_loss": cell.held_out_loss,
        "held_out_loss_stderr": cell.held_out_stderr,
        "excess_loss": cell.excess,
        "excess_loss_stderr": cell.excess_stderr,
        "lambda_max": top,
        "lambda_max_error": top_error,
        "lambda_max_high": h.ends.high if h.ends else top,
        "lambda_min": low,
        "lambda_min_error": low_error,
        "lambda_min_low": h.ends.low if h.ends else low,
        "trace": h.trace,
        "trace_stderr": h.trace_stderr,
        "trace_low": h.trace_low,
        "trace_high": h.trace_high,
        "frobenius": h.norm,
        "frobenius_stderr": h.norm_stderr,
        "frobenius_low": h.norm_low,
        "frobenius_high": h.norm_high,
        "ggn_trace": g.trace,
        "ggn_trace_stderr": g.trace_stderr,
        "ggn_frobenius": g.norm,
        "ggn_frobenius_stderr": g.norm_stderr,
        "ggn_lambda_max": cell.top()[0],
        "ggn_lambda_max_error": cell.top()[1],
    }
    for name in ("effective_rank", "trace_over_top", "spread", "gap"):
        found[name], found[f"{name}_stderr"] = QUANTITIES[name].of(cell)
    return found | {
        "gradient_norm": cell.gradient_norm,
        "variance": needed.variance,
        "variance_low": needed.variance_low,
        "variance_high": needed.variance_high,
        "tolerance": needed.tolerance,
        "k": needed.k,
        "k_low": needed.k_low,
        "k_high": needed.k_high,
        "checked_rms": needed.rms,
        "checked_rms_low": needed.rms_low,
        "checked_rms_high": needed.rms_high,
        "exact": h.exact,
    }
