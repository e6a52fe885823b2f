"""Tables, figures and captions of the study `sinks`, made from the arrays of its result."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.number_format import plural, with_error
from curvescope.runs.study_result import Line, Tables
from curvescope.studies.sinks.analysis import (
    EARLIER,
    HOWS,
    QUANTITIES,
    UNCHANGED,
    Intervention,
    Quantity,
    SinkEffect,
    effect,
    ends,
    ggn_ends,
    split,
)
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.sinks.study import Sinks


def tables(result: Sinks) -> Tables:
    """Return every table by name."""
    found = {
        "sinks": [sink_row(result, way) for way in all_ways(result)],
        "texts": [row for way in all_ways(result) for row in _text_rows(result, way)],
        "heads": _head_rows(result),
        "stream": _stream_rows(result),
        "blocks": _block_rows(result),
    }
    return {name: rows for name, rows in found.items() if rows}


def all_ways(result: Sinks) -> list[Intervention]:
    """Return every intervention, starting at strength 0, the unchanged model."""
    starts = {way.how: Intervention(way.how, 0.0) for way in result.ways}
    ways = []
    for way in result.ways:
        ways += [starts.pop(way.how)] if way.how in starts else []
        ways.append(way)
    return ways


def sink_row(result: Sinks, way: Intervention) -> dict[str, Any]:
    """One intervention at one strength: means over texts, and factors relative to the unchanged model."""
    name, one = way.name, result.moved[way.name]
    h, g, bulk = ends(result, name), ggn_ends(result, name), split(result, name)
    settled = np.abs(bulk.width - split(result, name, earlier=EARLIER).width).mean()
    row: dict[str, Any] = {
        "how": way.how,
        "strength": way.strength,
        "sink_mass": one.mass.mean(),
        "loss": one.loss.mean(),
        "lambda_max": h.top.mean(),
        "lambda_max_error": h.top_error.mean(),
        "lambda_min": h.bottom.mean(),
        "lambda_min_error": h.bottom_error.mean(),
        "bulk_width": bulk.width.mean(),
        "bulk_width_error": probe_error(bulk.width) + settled,
        "outliers": bulk.outliers.mean(),
        "outliers_error": probe_error(bulk.outliers),
        "ggn_lambda_max": g.top.mean(),
        "ggn_lambda_max_error": g.top_error.mean(),
    }
    for quantity in QUANTITIES:
        found = effect(result, name, quantity)
        row |= {f"{quantity}_times": found.mean, f"{quantity}_low": found.low, f"{quantity}_high": found.high}
        row |= {f"{quantity}_direction": found.direction}
    return row


def probe_error(samples: np.ndarray) -> float:
    """Standard error over probes of the mean over texts of (X, P); each text has its own probes."""
    texts, count = samples.shape
    return float(np.sqrt((samples.var(axis=1, ddof=1) / count).sum()) / texts)


def _text_rows(result: Sinks, way: Intervention) -> list[dict[str, Any]]:
    name, one = way.name, result.moved[way.name]
    h, g, bulk = ends(result, name), ggn_ends(result, name), split(result, name)
    factors = {quantity: effect(result, name, quantity) for quantity in QUANTITIES}
    count = np.sqrt(bulk.width.shape[1])
    rows = []
    for x in range(len(one.loss)):
        row: dict[str, Any] = {"how": way.how, "strength": way.strength, "text": x}
        row |= {"sink_mass": one.mass[x], "loss": one.loss[x]}
        row |= {"lambda_max": h.top[x], "lambda_max_error": h.top_error[x]}
        row |= {"lambda_min": h.bottom[x], "lambda_min_error": h.bottom_error[x]}
        row |= {"bulk_width": bulk.width[x].mean(), "bulk_width_stderr": bulk.width[x].std(ddof=1) / count}
        row |= {"outliers": bulk.outliers[x].mean(), "outliers_stderr": bulk.outliers[x].std(ddof=1) / count}
        row |= {"ggn_lambda_max": g.top[x], "ggn_lambda_max_error": g.top_error[x]}
        for quantity, found in factors.items():
            row |= {f"{quantity}_times": found.texts[x], f"{quantity}_times_error": found.errors[x]}
        rows.append(row)
    return rows


def _head_rows(result: Sinks) -> list[dict[str, Any]]:
    heads = result.heads
    return [
        {
            "layer": i,
            "head": j,
            "sink_mass": heads.mass[i, j],
            "sink_mass_spread": heads.mass_spread[i, j],
            "value_norm": heads.values[i, j],
        }
        for i, j in np.ndindex(*heads.mass.shape)
    ]


def _stream_rows(result: Sinks) -> list[dict[str, Any]]:
    heads = result.heads
    triples = zip(heads.points, heads.massive, heads.massive_others, strict=True)
    return [{"point": p, "first_token": first, "other_tokens": others} for p, first, others in triples]


def _block_rows(result: Sinks) -> list[dict[str, Any]]:
    rows = []
    for way in [Intervention("", 0.0), *result.last()] if result.blocks else []:
        one, before = result.blocks[way.name], result.blocks[UNCHANGED]
        for name, value, error, start in zip(one.names, one.values, one.errors, before.values, strict=True):
            row = {"how": way.how or UNCHANGED, "strength": way.strength, "blocks": name}
            row |= {"lambda_max": value, "lambda_max_error": error}
            rows.append(row | {"times": value / start if start else np.nan})
    return rows


ROWS: tuple[tuple[str, tuple[Quantity, ...]], ...] = (
    ("λ_max, times", ("lambda_max", "ggn_lambda_max")),
    ("factor on the bulk width", ("bulk_width",)),
    ("outliers, times", ("outliers",)),
)
DENSE = 1.2  # decades in which three labels fit
ASIDE = 0.022  # horizontal shift between texts at one strength, as a share of the axis
NUMBERED = 12  # rows and columns up to which a map has numbers in its cells


def figures(result: Sinks) -> dict[str, Figure]:
    """Return the figures by name, without those that were not measured."""
    found = {"spectra": _spectra(result)} if result.ways else {}
    if result.heads.mass.size:
        found["heads"] = _heads(result)
    if len(result.blocks) > 1:
        found["blocks"] = _blocks(result)
    return found


def _spectra(result: Sinks) -> Figure:
    hows = list(dict.fromkeys(result.hows))
    size = (1.4 + max(1.95 * len(hows), 3.0), 6.6)
    figure, axes = style.subplots(3, len(hows), figsize=size, sharey="row", squeeze=False)
    for column, how in enumerate(hows):
        ways = [way for way in all_ways(result) if way.how == how]
        names, strengths = [way.name for way in ways], [way.strength for way in ways]
        for row, (label, quantities) in enumerate(ROWS):
            ax = axes[row][column]
            for i, quantity in enumerate(quantities):
                _follow(ax, result, names, quantity, color=PALETTE[row], dashed=i > 0)
            ax.axhline(1, color="0.5", lw=0.6)
            ax.set_yscale("log")
            ax.set_xticks(range(len(ways)), [f"{s:g}" for s in strengths])
            if column == 0:
                ax.set_ylabel(label)
        masses = [result.moved[name].mass.mean() for name in names]
        reached = "" if np.isnan(masses[-1]) else f"\nsink mass {masses[0]:.2f} → {masses[-1]:.2f}"
        axes[0][column].set_title(f"{how}{reached}")
        axes[2][column].set_xlabel(textwrap.fill(HOWS[how], 34))
    for row in axes:
        few_ticks(row[0])
    title = f"The Hessian of {result.model} as an attention sink grows"
    figure.suptitle("\n".join(textwrap.wrap(title, int(9 * size[0]))))
    return figure


def few_ticks(ax: Axes) -> None:
    """Draw as many labels of a logarithmic axis as fit."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    low, high = ax.get_ylim()
    decades = float(np.log10(high / low))
    subs = (1.0, 2.0, 5.0) if decades < DENSE else (1.0, 3.0) if decades < 2 * DENSE else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _follow(
    ax: Axes, result: Sinks, names: list[str], quantity: Quantity, *, color: str, dashed: bool
) -> None:
    """Draw means over texts as a line; unless it is dashed, also texts as dots with errors."""
    found = [effect(result, name, quantity) for name in names]
    x = np.arange(len(names))
    ax.plot(x, [one.mean for one in found], "--" if dashed else "-", lw=1.2, color=color)
    count = len(found[0].texts)
    for t in range(0 if dashed else count):
        aside = ASIDE * (len(names) - 1) * (t - (count - 1) / 2)
        draw_text(ax, x + aside, found, t, color=color, alpha=0.6)


def draw_text(ax: Axes, x: np.ndarray, found: list[SinkEffect], text: int, **look: Any) -> None:
    """Draw the factors of one text as dots with errors of their logarithms."""
    values = np.array([one.texts[text] for one in found])
    spread = np.array([one.errors[text] for one in found])
    errors = style.error_bars(values, values * np.exp(-spread), values * np.exp(spread))
    ax.errorbar(x, values, yerr=errors, fmt="o", ms=2.5, lw=0.8, **look)


def _heads(result: Sinks) -> Figure:
    heads = result.heads
    panels = 2 + bool(heads.massive.size)
    figure, axes = style.subplots(1, panels, figsize=(3.9 * panels, 3.1), squeeze=False)
    _map(axes[0][0], heads.mass, "weight on the first token", (0.0, 1.0))
    high = float(np.nanmax(heads.values)) if np.isfinite(heads.values).any() else 1.0
    _map(axes[0][1], heads.values, "‖v‖ at the first token / at others", (0.0, max(high, 1.0)))
    if panels > 2:
        ax, x = axes[0][2], np.arange(len(heads.points))
        ax.plot(x, heads.massive, "-o", ms=4, lw=1.2, color=PALETTE[1], label="first token")
        ax.plot(x, heads.massive_others, "-o", ms=4, lw=1.2, color=PALETTE[0], label="other tokens")
        every = max(1, len(x) // 12)
        ax.set_xticks(x[::every], heads.points[::every])
        ax.set(ylim=0, title="largest over median |x| in the stream")
        ax.legend()
    return figure


def _map(ax: Axes, values: np.ndarray, title: str, limits: tuple[float, float]) -> None:
    image = ax.imshow(values, cmap=style.MAP, vmin=limits[0], vmax=limits[1], aspect="auto")
    if max(values.shape) <= NUMBERED:
        style.write_cells(ax, "{:.2f}".format, size=7)
    ax.set_xticks(range(0, values.shape[1], max(1, values.shape[1] // NUMBERED)))
    ax.set_yticks(range(0, values.shape[0], max(1, values.shape[0] // NUMBERED)))
    ax.set(xlabel="head", ylabel="layer", title=title)
    ax.figure.colorbar(image, ax=ax, shrink=0.85)


def _blocks(result: Sinks) -> Figure:
    """Draw λ_max of every group of blocks at the largest strength of each intervention, as a factor."""
    from matplotlib.colors import LogNorm

    before, ways = result.blocks[UNCHANGED], result.last()
    times = np.array([result.blocks[way.name].values for way in ways]).T / before.values[:, None]
    far = max(float(np.nanmax(np.abs(np.log(np.where(times > 0, times, np.nan))))), 0.1)
    figure, ax = style.subplots(figsize=(2.6 + 1.1 * len(ways), 1.3 + 0.42 * len(before.names)))
    norm = LogNorm(vmin=np.exp(-far), vmax=np.exp(far))
    image = ax.imshow(np.ma.masked_less_equal(times, 0), norm=norm, cmap=style.SIGNED, aspect="auto")
    for (i, j), value in np.ndenumerate(times):
        faint = value > 0 and abs(np.log(value)) < 0.6 * far
        ax.text(j, i, f"× {value:.2g}", ha="center", va="center", color="black" if faint else "white")
    ax.set_xticks(range(len(ways)), [f"{way.how} {way.strength:g}" for way in ways])
    rows = [f"{name} ({value:.3g})" for name, value in zip(before.names, before.values, strict=True)]
    ax.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=ax, label="factor on λ_max")
    return figure


def summary(result: Sinks) -> list[Line]:
    """Return the main numbers, each with a label and an explanation."""
    one = result.moved[UNCHANGED]
    terms = f"{sum(result.num_terms):g} terms of {result.data} in {plural(len(one.loss), 'text')}"
    found = [("loss", f"{one.loss.mean():.4f}", f"{result.loss_name}, {terms}")]
    found += _strongest(result)
    h, bulk = ends(result, UNCHANGED), split(result, UNCHANGED)
    stderr = probe_error(bulk.width)
    found += [
        (
            "λ_max",
            with_error(float(h.top.mean()), float(h.top_error.mean())),
            "of H, mean over texts; ± residual",
        ),
        (
            "bulk width",
            with_error(float(bulk.width.mean()), stderr),
            f"{bulk.outliers.mean():.0f} outliers beyond a soft threshold of {result.threshold:g} of the "
            "largest |λ|; ± standard error over probes",
        ),
    ]
    found += [_moved(result, way.how, way.name, way.strength) for way in result.last()]
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: Sinks) -> str:
    """State where the strongest sink is, and the effect of growing a sink on the largest eigenvalue."""
    strongest = _strongest(result)
    sink = f"{strongest[0][1]} {strongest[0][2]}." if strongest else ""
    effects = {way: effect(result, way.name, "lambda_max") for way in result.last()}
    sure = {way: found for way, found in effects.items() if found.direction}
    if not effects:
        return sink
    if not sure:
        return f"{sink} No intervention changes λ_max beyond its error.".strip()
    way = max(sure, key=lambda way: abs(np.log(sure[way].mean)))
    effect_text = f"multiplies λ_max by {sure[way].mean:.2f} ({sure[way].low:.2f} to {sure[way].high:.2f})"
    return (
        f"{sink} Among {plural(len(effects), 'intervention')} that grow a sink, {way.how} "
        f"{way.strength:g} has the largest effect: it {effect_text}."
    ).strip()


def _strongest(result: Sinks) -> list[Line]:
    heads = result.heads
    if not heads.mass.size:
        return []
    i, j = np.unravel_index(int(heads.mass.argmax()), heads.mass.shape)
    words = f"of the attention weight of L{i}.h{j} goes to the first token, the largest share of any head; "
    words += f"{100 * heads.mass.mean():.0f} % over all heads"
    found = [("strongest sink", f"{100 * heads.mass[i, j]:.0f} %", words)]
    if heads.massive.size:
        n = int(heads.massive.argmax())
        words = f"largest over median |x| of the stream at the first token, {heads.points[n]}; "
        words += f"{heads.massive_others[n]:.1f} at other tokens"
        found.append(("massive activation", f"{heads.massive[n]:.1f}", words))
    return found


def _moved(result: Sinks, how: str, name: str, strength: float) -> Line:
    """Effect of an intervention at its largest strength."""

    def said(quantity: Quantity, label: str) -> str:
        found = effect(result, name, quantity)
        sure = "" if found.direction else ", undecided"
        return f"{label} × {found.mean:.2f} ({found.low:.2f} to {found.high:.2f}{sure})"

    mass = result.moved[name].mass.mean()
    reached = "" if np.isnan(mass) else f"sink mass {mass:.2f}; "
    return (
        f"{how} {strength:g}",
        f"× {effect(result, name, 'lambda_max').mean:.2f}",
        f"λ_max; {HOWS[how]}: {reached}{said('lambda_max', 'λ_max')}, {said('bulk_width', 'bulk width')}",
    )


def captions(result: Sinks) -> dict[str, str]:
    """Return the caption of each figure and table."""
    one = result.moved[UNCHANGED]
    texts = plural(len(one.loss), "text")
    probes, steps = one.hessian.alpha.shape[1:]
    bulk = (
        f"Outliers are counted softly, as x⁴/(1 + x⁴) with x = λ/τ, where τ is {result.threshold:g} of "
        "the largest |λ| of the unchanged model on the same text. The bulk width is the root mean "
        "square of the other eigenvalues"
    )
    how = (
        f"From {plural(probes, 'probe')} with {steps} Lanczos steps on each of {texts}, paired over "
        "interventions"
    )
    factors = (
        "Factors are relative to the unchanged model on the same text and with the same probes. low and "
        "high: 95 % interval over texts (sampling). direction is 1 or −1 if this interval excludes one, "
        "so the effect holds on other texts; 0 (`undecided` in the summary) if it includes one, or if "
        "there is a single text. Errors of single texts are numerical: residuals for eigenvalues; for "
        "the bulk, the 95 % interval over probes and the change by the last Lanczos steps"
    )
    return {
        "sinks": f"The spectrum as a sink grows. {how}. {bulk}. An eigenvalue lies within the errors of "
        "λ_max and λ_min. Sink mass: attention weight on the first token (and on the inserted ones) "
        f"from later tokens, before a gate. {factors}.",
        "texts": f"The spectrum as a sink grows, for each text. {factors}.",
        "spectra": "Factors on λ_max (dashed: GGN), bulk width and number of outliers as a sink grows, one "
        f"column per intervention. {how}. {bulk}. Dots are texts with their errors, lines geometric "
        "means. An effect is decided if the 95 % interval over texts excludes one.",
        "heads": "Mean attention weight on the first token over later queries and sequences, its standard "
        "deviation over sequences, and the norm of the first token's value over the mean norm of the "
        "others.",
        "stream": "Massive activations: largest over median |x| in the residual stream at the first token "
        "and at other tokens, at the input and after each layer.",
        "blocks": "λ_max of groups of diagonal blocks on the first text, unchanged and at the largest "
        "strength of each intervention, and as a factor; an eigenvalue lies within the error.",
    }
