"""What is said about the published curves: the numbers to look at first, tables, captions, notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from curvescope.runs.shown import Line
from curvescope.studies.landscape.analysis import EMA
from curvescope.studies.landscape.view import interval

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.papers.petrov2025.convergence.study import Convergence, Curve


def summary(found: Convergence) -> list[Line]:
    """Slopes of model and control, network by network."""
    lines = [
        (
            name,
            interval(c.growth.model.slope),
            f"slope; control {interval(c.growth.control.slope)}; {c.network}",
        )
        for name, c in found.curves.items()
    ]
    return [*lines, *(("note", "", note) for note in found.notes)]


def notes(curves: Mapping[str, Curve]) -> list[str]:
    """What differs from the publications."""
    own = dict.fromkeys(f"{c.family}: {c.note}" for c in curves.values() if c.note)
    used = ", ".join(dict.fromkeys(c.pictures for c in curves.values()))
    return [
        f"pictures: {used}; published: cifar100 (E4), mnist (E7, and E8 among others)",
        "learning rates of E4, the head of E7 (trained here) and biases of E8 are choices of ours; E7 has no "
        "dropout here; E8 on features of a ViT is not made",
        *own,
    ]


def tables(found: Convergence) -> dict[str, pd.DataFrame]:
    """Curves at some k; one row per network."""
    import pandas as pd

    curves = []
    for name, c in found.curves.items():
        g = c.growth
        columns = {
            "k": g.k * c.group, "model": g.model.rms, "control": g.control.rms, "law": g.law,
            "model_mean": g.model.mean, "control_mean": g.control.mean,
            "model_smoothed": g.model.smoothed, "control_smoothed": g.control.smoothed,
        }  # fmt: skip
        curves.append(pd.DataFrame({"experiment": name, **columns}))
    return {
        "convergence": pd.concat(curves, ignore_index=True),
        "convergence_networks": pd.DataFrame([_row(name, c) for name, c in found.curves.items()]),
    }


def _row(name: str, c: Curve) -> dict[str, object]:
    row: dict[str, object] = {
        "experiment": name, "network": c.network, "pictures": c.pictures, "parameters": c.num_parameters,
        "trained": c.num_trained, "accuracy": c.accuracy, "loss": float(c.losses.mean()),
        "deviation": c.deviation, "group": c.group,
    }  # fmt: skip
    for kind, curve in (("model", c.growth.model), ("control", c.growth.control)):
        value, low, high = curve.slope
        row |= {f"slope_{kind}": value, f"slope_{kind}_low": low, f"slope_{kind}_high": high}
    return {**row, "ratio": float(c.growth.model.ratio[0])}


def captions(found: Convergence) -> dict[str, str]:
    """What each figure and table shows."""
    orders = next(iter(found.curves.values())).growth.num_orders
    return {
        "convergence": f"Mean |L_{{k+1}} − L_k| over {orders} random orders of the training pictures, "
        f"smoothed as published (moving average, {EMA}), for networks of the published kinds. Dotted: "
        "independent numbers with the same mean and variance (control); dashed: the limit, mean "
        "|l − mean|/k. Of E4 a number is the mean loss of a batch, k counts pictures. The table has "
        "root mean squares (model, control, and the law √(Var/(k(k+1)))) too.",
        "convergence_widths": "The limit of k|L_{k+1} − L_k|, which is the mean |l − mean| of the losses, of "
        "fully connected networks against their width; a line per number of matrices.",
        "convergence_networks": "Every network: pictures, parameters and those that were trained, validation "
        "accuracy, mean training loss, its mean absolute deviation, slopes of model and control with 95 % "
        "intervals, and k(k+1) E(L_{k+1} − L_k)² over the variance.",
    }
