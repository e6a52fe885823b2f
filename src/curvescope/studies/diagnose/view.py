"""Tables, figures and captions of the study `diagnose`, made from the arrays of its result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.number_format import plural, rounded
from curvescope.runs.study_result import Line
from curvescope.studies.diagnose.checks import Finding, block_threshold, by_layer
from curvescope.viz import blocks, style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.diagnose.study import Diagnosis

COLUMNS = ("name", "severity", "value", "error", "limit", "unit", "where", "meaning", "advice", "evidence")
Row = dict[str, Any]


def tables(diagnosis: Diagnosis) -> dict[str, pd.DataFrame]:
    """Those that the model has."""
    import pandas as pd

    rows = {
        "checks": [_check(check) for check in diagnosis.checks],
        "layers": layer_rows(diagnosis),
        "blocks": block_rows(diagnosis),
        "heads": [
            {k: v for k, v in row.items() if k not in ("layer", "number")} for row in head_rows(diagnosis)
        ],
        "sequences": sequence_rows(diagnosis),
        "headline": []
        if diagnosis.parts.sampled is None
        else [
            diagnosis.parts.sampled.columns("lambda_max"),
        ],
        "parts": [
            {"part": i, "lambda_max": top, "lambda_max_numerical": error}
            for i, (top, error) in enumerate(zip(diagnosis.parts.top, diagnosis.parts.error, strict=True))
        ],
    }
    findings = pd.DataFrame([finding_row(check) for check in diagnosis.findings], columns=list(COLUMNS))
    return {"findings": findings} | {name: pd.DataFrame(some) for name, some in rows.items() if some}


def finding_row(check: Finding) -> Row:
    """A finding as it is printed."""
    return {name: getattr(check, name) for name in COLUMNS}


def _check(check: Finding) -> Row:
    kept = ("name", "severity", "value", "error", "limit", "unit", "where")
    why = check.meaning if check.severity == "not looked at" else ""
    return {name: getattr(check, name) for name in kept} | {"why not": why}


def layer_rows(diagnosis: Diagnosis) -> list[Row]:
    """Norms of the Hessian's rows over a layer's matrices, and of the gradient without W_Q and W_K."""
    gradient, rows = diagnosis.parts.gradient, []
    for i, (layer, squares) in enumerate(by_layer(diagnosis.rows.names, diagnosis.rows.squares).items()):
        norm = float(np.sqrt(squares.mean()))
        stderr = float(squares.std(ddof=1) / np.sqrt(len(squares)))
        rows.append(
            {
                "layer": f"L{layer}",
                "rows_norm": norm,
                "rows_norm_stderr": stderr / (2 * norm) if norm else np.nan,
                "gradient_norm": float(np.sqrt(gradient[i])) if i < len(gradient) else np.nan,
            }
        )
    return rows


def block_rows(diagnosis: Diagnosis) -> list[Row]:
    """Matrices, the sharpest first."""
    if diagnosis.blocks is None:
        return []
    b, most = diagnosis.blocks, block_threshold(diagnosis.sharpness)
    return [
        {
            "block": b.names[i],
            "lambda_max": float(b.top[i]),
            "lambda_max_numerical": float(b.error[i]),
            "lambda_max_bound": float(b.high[i]),
            "ceiling": most / float(b.top[i]) if b.top[i] > 0 else np.nan,
        }
        for i in np.argsort(-b.top)
    ]


def head_rows(diagnosis: Diagnosis) -> list[Row]:
    """Heads, layer by layer."""
    heads = diagnosis.heads
    shape = heads.liveness.shape[1:] if heads.liveness.size else heads.written.shape
    none = np.full(shape, np.nan)
    live, mass = (x.mean(0) if x.size else none for x in (heads.liveness, heads.mass))
    usual = float(np.median(heads.written)) if heads.written.size else 0.0
    written = heads.written / usual if usual > 0 else none
    change = heads.change if heads.change.size else none
    return [
        {
            "head": f"L{i}.h{j}",
            "layer": i,
            "number": j,
            "liveness": float(live[i, j]),
            "first_token": float(mass[i, j]),
            "written": float(written[i, j]),
            "loss_change": float(change[i, j]),
        }
        for i, j in np.ndindex(*shape)
    ]


def sequence_rows(diagnosis: Diagnosis) -> list[Row]:
    """Sequences that count."""
    s = diagnosis.samples
    return [
        {
            "sequence": number,
            "loss": float(s.losses[i]),
            "gradient_norm": float(s.gradient_norms[i]),
            "trace": float(s.traces[i]),
            "trace_stderr": float(s.traces_stderr[i]),
            "copy_of": str(s.copies[number]) if s.copies[number] != number else "",
        }
        for i, number in enumerate(s.numbers.astype(int).tolist())
    ]


# ---------------------------------------------------------------------------------------------------- figures

COLORS = {
    "fault": "#b2182b",
    "warning": "#e08214",
    "note": "#2166ac",
    "fine": "#4d9221",
    "not looked at": "0.6",
}
LOW, HIGH = 1e-2, 1e2  # of the axis; beyond, a point stands at its edge
MOST_BLOCKS = 30


def figures(diagnosis: Diagnosis) -> dict[str, Figure]:
    """Those that the model has."""
    figures = {"checks": _checks(diagnosis)}
    if len(layer_rows(diagnosis)) > 1:
        figures["layers"] = _layers(diagnosis)
    if block_rows(diagnosis):
        figures["blocks"] = _blocks(diagnosis)
    if head_rows(diagnosis):
        figures["heads"] = _heads(diagnosis)
    return figures


def _checks(diagnosis: Diagnosis) -> Figure:
    """Value over limit, unusual to the right of the line."""
    import matplotlib.pyplot as plt

    shown = diagnosis.checks
    figure, ax = plt.subplots(figsize=(8.6, 1.1 + 0.34 * len(shown)), layout="constrained")
    for y, check in enumerate(shown):
        _row(ax, y, check)
    ax.axvline(1.0, color="0.3", lw=1)
    ax.axvspan(1.0, HIGH * 1.6, color="0.95", zorder=0)
    ax.set(xscale="log", xlim=(LOW / 1.6, HIGH * 1.6), ylim=(len(shown) - 0.4, -0.6))
    ax.set_yticks(range(len(shown)), [check.name.replace("_", " ") for check in shown], fontsize=9)
    for label, check in zip(ax.get_yticklabels(), shown, strict=True):
        label.set_color(COLORS[check.severity])
    ax.set_xlabel("value over limit: usual left of the line, unusual right of it")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    _legend(figure, [check.severity for check in shown])
    return figure


def _row(ax: Axes, y: int, check: Finding) -> None:
    """A point with its error, and the number itself at the right."""
    color = COLORS[check.severity]
    middle, low, high = _places(check)
    if not math.isnan(middle):
        marker = ">" if middle >= HIGH else "<" if middle <= LOW else "o"
        error = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
        ax.errorbar([middle], [y], xerr=error, fmt=marker, color=color, ms=6, lw=1.2, capsize=2)
    words = "not looked at" if check.severity == "not looked at" else f"{check.number}  {check.unit}"
    ax.annotate(
        words,
        (1.01, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        color=color if check.found else "0.35",
    )


def _places(check: Finding) -> tuple[float, float, float]:
    """Places of the value and its ends on the axis; with a limit of zero the value is at an edge."""
    if check.limit == 0:
        edge = HIGH if check.value > 0 else LOW
        return edge, edge, edge
    middle, low, high = (float(np.clip(x, LOW, HIGH)) for x in check.excess)
    return middle, low, high


def _legend(figure: Figure, severities: list[str]) -> None:
    from matplotlib.lines import Line2D

    kinds = [kind for kind in COLORS if kind in severities]
    handles = [Line2D([], [], marker="o", ls="", color=COLORS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(kinds), fontsize=9)


def _layers(diagnosis: Diagnosis) -> Figure:
    """Curvature and gradient of each layer."""
    import matplotlib.pyplot as plt

    rows = layer_rows(diagnosis)
    names = [str(row["layer"]) for row in rows]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.0), layout="constrained")
    series = {"rows_norm": "norm of the Hessian's rows", "gradient_norm": "norm of the gradient"}
    for ax, (key, label) in zip(axes, series.items(), strict=True):
        values = np.array([row[key] for row in rows], dtype=float)
        error = np.array([row.get(f"{key}_stderr", 0.0) for row in rows], dtype=float)
        ax.errorbar(x, values, yerr=np.minimum(error, 0.99 * values), fmt="o-", color=style.BLUE, lw=1, ms=5)
        ax.axhline(np.median(values), color="0.6", lw=0.8, ls="--")
        ax.set_yscale("log")
        span = max(float(np.nanmax(values) / np.nanmin(values)), 10.0) ** 0.15
        ax.set_ylim(float(np.nanmin(values)) / span / 1.5, float(np.nanmax(values)) * span * 1.5)
        step = max(1, len(x) // 12)
        ax.set_xticks(x[::step], names[::step])
        ax.set_title(label)
    return figure


def _blocks(diagnosis: Diagnosis) -> Figure:
    """λ_max of the sharpest matrices, with the bound from above."""
    import matplotlib.pyplot as plt

    rows = block_rows(diagnosis)[:MOST_BLOCKS]
    top, high = (
        np.array([row[key] for row in rows], dtype=float) for key in ("lambda_max", "lambda_max_bound")
    )
    figure, ax = plt.subplots(figsize=(2.5 + 0.24 * len(rows), 3.8), layout="constrained")
    named = {"λ_max, with its bound from above": (top, top, np.maximum(high, top))}
    blocks.bars(ax, [str(row["block"]) for row in rows], named, label="λ_max of the block")
    return figure


def _heads(diagnosis: Diagnosis) -> Figure:
    """Three maps, layer × head."""
    import matplotlib.pyplot as plt

    rows = head_rows(diagnosis)
    L, h = 1 + int(rows[-1]["layer"]), 1 + int(rows[-1]["number"])
    panels = {
        "liveness": ("liveness", 0.0, 1.0),
        "first_token": ("weight on the first token", 0.0, 1.0),
        "written": ("written, over the median head", 0.0, None),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 1.5 + 0.3 * min(L, 24)), layout="constrained")
    for ax, (key, (title, low, high)) in zip(axes, panels.items(), strict=True):
        values = np.array([row[key] for row in rows], dtype=float).reshape(L, h)
        image = ax.imshow(values, vmin=low, vmax=high, cmap=style.MAP, aspect="auto")
        _numbers(ax, values, image)
        ax.set_title(title)
        ax.set_xticks(range(h)[:: max(1, h // 12)])
        ax.set_yticks(range(L)[:: max(1, L // 12)])
        ax.set(xlabel="head", ylabel="layer")
        figure.colorbar(image, ax=ax)
    return figure


def _numbers(ax: Axes, values: np.ndarray, image: Any) -> None:
    """Write the values into the cells if these are large enough."""
    if values.shape[1] > 8 or values.shape[0] > 16:
        return
    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            color = style.ink_at(image, value)
            ax.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7, color=color)


# --------------------------------------------------------------------------------------------------- captions

NOTHING = "nothing unusual"


def summary(diagnosis: Diagnosis) -> list[Line]:
    """The verdict, then every finding: name, number, severity with its meaning."""
    lines = [("diagnosis", "", verdict(diagnosis))]
    for check in diagnosis.findings:
        place = f" ({check.where})" if check.where else ""
        lines.append((check.name, check.number, f"{check.severity}: {check.meaning}{place}"))
    return lines


def opening(diagnosis: Diagnosis) -> str:
    """Count the findings and name the worst."""
    looked = f"{_looked(diagnosis, ' (', ')')} on {diagnosis.num_terms:g} terms of {diagnosis.data}"
    number = diagnosis.parts.sampled
    top = "" if number is None else f" λ_max of the Hessian is {number.headline} ({number.verdict()})."
    if not diagnosis.unusual:
        return f"Nothing unusual in {looked}; the finding on the learning rate is its ceiling.{top}"
    worst = diagnosis.unusual[0]
    place = f" ({worst.where})" if worst.where else ""
    counts = verdict(diagnosis).partition(";")[0]
    return f"Of {looked}, {counts}. The first: {worst.meaning}{place}.{top}"


def verdict(diagnosis: Diagnosis) -> str:
    """`2 faults, 1 warning` or that nothing is unusual, and of how many checks."""
    kinds = ("fault", "warning", "note")
    counts = {kind: sum(c.severity == kind for c in diagnosis.unusual) for kind in kinds}
    unusual = ", ".join(plural(count, kind) for kind, count in counts.items() if count)
    number = diagnosis.parts.sampled
    top = "" if number is None else f"; λ_max {number.headline}, {number.verdict()}"
    return f"{unusual or NOTHING}; {_looked(diagnosis, ', ')}, loss {rounded(diagnosis.whole.loss)}{top}"


def _looked(diagnosis: Diagnosis, begin: str, end: str = "") -> str:
    """`13 checks, 3 not looked at`."""
    left = sum(check.severity == "not looked at" for check in diagnosis.checks)
    looked = plural(len(diagnosis.checks) - left, "check")
    return f"{looked}{begin}{left} not looked at{end}" if left else looked


def captions(diagnosis: Diagnosis) -> dict[str, str]:
    """Captions of the figures and tables, by name."""
    return {
        "findings": "Findings, worst first, each with its number and error, its meaning, advice, and the "
        "evidence that it rests on.",
        "checks": "Every check: its value over its limit, with the error; unusual lies to the right of the "
        "line, "
        "by more than the error. Not looked at: what does not apply to this model, with the reason.",
        "layers": "Norm of the Hessian's rows of each layer's matrices, from shared probes, and norm of the "
        "gradient.",
        "blocks": "λ_max of every matrix by itself with its residual, and the learning rate that descent on "
        "it alone allows (2/λ_max, more with momentum); at most the bound on these data, 95 times in 100.",
        "headline": "λ_max of the Hessian with its residual (numerical), one standard error over other data "
        "of this size (sampling), and the 95 % interval from both (low to high).",
        "heads": "Liveness (1: equal weights, 0: all on one key), weight on the first token, what the head "
        "writes over the median head, and the change of the loss without it where it was ablated.",
        "sequences": "Loss, gradient norm and trace of the GGN of every sequence; `copy_of` is the first "
        "equal one.",
        "parts": "λ_max on disjoint parts of the data.",
    }
