"""What is measured of a cell, by name: a number, its error, and whether a law of it is looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from curvescope.studies.scaling.cell import Cell


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
