"""Tables, figures and captions of the study `gap`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms import SpectralDensity
from curvescope.core.number_format import LIES_BETWEEN, between, plural, rounded, with_error
from curvescope.runs.study_result import Line, Tables
from curvescope.studies.common.columns import pick, probe_columns
from curvescope.studies.gap.analysis import Pair, ValueWithError
from curvescope.viz import style
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, Curve, curves, grid_map, said, switched
from curvescope.viz.scenes.curves import axis, log_axis, over
from curvescope.viz.style import GRAY, LOOKS, PALETTE, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.gap.study import Gap

SHORT = {"hessian": "H", "ggn": "H_o", "functional": "H_f"}
OVER_TRAINING = (
    "checkpoint", "loss", "functional_share", "functional_share_error", "lambda_max_gap",
    "lambda_max_gap_error", "trace_gap", "trace_gap_error", "wasserstein", "wasserstein_error",
)  # fmt: skip


def tables(result: Gap) -> Tables:
    """Return `gap` by checkpoint and block, `training` by checkpoint, `targets` by kind of targets."""
    rows = [
        {"checkpoint": name, **row(result.pair(name, block))}
        for name in result.checkpoints
        for block in result.blocks
    ]
    whole = [one for one in rows if one["block"] == result.blocks[0]]
    found = {"gap": rows, "training": [{name: one[name] for name in OVER_TRAINING} for one in whole]}
    if result.targets:
        last = {"the data's own": result.pair(result.checkpoints[-1]), **result.targets}
        found["targets"] = [{"targets": name, **row(pair)} for name, pair in last.items()]
    return found


def row(pair: Pair) -> dict[str, Any]:
    """Return all numbers of one block."""
    found: dict[str, Any] = {"block": pair.block, "parameters": pair.size, "loss": pair.loss}
    for part in ("hessian", "ggn"):
        value, error = pair.top(part)
        ends = getattr(pair, part).ends
        key = f"lambda_max_{SHORT[part]}"
        found |= {key: value, f"{key}_error": error, f"{key}_high": ends.high}
    found |= dict(zip(("lambda_max_gap", "lambda_max_gap_error"), pair.gap(), strict=True))
    found |= dict(zip(("lambda_max_gap_low", "lambda_max_gap_high"), pair.gap_interval(), strict=True))
    for part, letter in SHORT.items():
        found |= probe_columns(getattr(pair, part), f"_{letter}")
    found |= dict(zip(("trace_gap", "trace_gap_error"), pair.trace_gap(), strict=True))
    found |= dict(zip(("functional_share", "functional_share_error"), pair.share(), strict=True))
    found |= dict(zip(("wasserstein", "wasserstein_error"), pair.wasserstein(), strict=True))
    if pair.distance is not None and pair.scale > 0:
        ends = pick(pair.distance, "low", "high", "stderr", "least", "most", "unresolved")
        found |= {f"wasserstein_{name}": value / pair.scale for name, value in ends.items()}
    return found | {"rms_eigenvalue_H": pair.scale, "method": "exact" if pair.hessian.exact else "probes"}


NAMES = {"hessian": "Hessian", "ggn": "GGN"}
ALL, BOUND = Look("black", "-", "o"), Look(style.GRAY, "--", "s")


def figures(result: Gap) -> dict[str, Figure]:
    """Draw the gap over training and by block, densities, and other targets."""
    found = {"over_training": _figure_over_training(result), "blocks": _figure_blocks(result)}
    if result.pair(result.checkpoints[-1]).densities:
        found["densities"] = _densities(result)
    if result.targets:
        found["other_targets"] = _figure_targets(result)
    return found


def _figure_over_training(result: Gap) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(12.5, 3.7), squeeze=False)
    pairs = [result.pair(name) for name in result.checkpoints]
    x = np.arange(len(pairs))
    ticks = [f"{name}\nloss {pair.loss:.2f}" for name, pair in zip(result.checkpoints, pairs, strict=True)]
    _line(axes[0][0], x, [pair.share() for pair in pairs], ALL, "all", width=2.0)
    for i, block in enumerate(result.blocks[1:7]):
        shares = [result.pair(name, block).share() for name in result.checkpoints]
        _line(axes[0][0], x, shares, style.look(i), block, width=0.9)
    axes[0][0].set_title("functional share ‖H_f‖/‖H‖")
    axes[0][0].set_ylim(bottom=0)
    for part, name in NAMES.items():
        _line(axes[0][1], x, [pair.top(part) for pair in pairs], LOOKS[part], name)
    axes[0][1].set(title="λ_max of the whole model", yscale="log")
    _line(axes[0][2], x, [pair.wasserstein() for pair in pairs], LOOKS["hessian"], "W₁ / (‖H‖/√n)")
    _line(axes[0][2], x, [pair.share() for pair in pairs], BOUND, "‖H_f‖/‖H‖, which bounds W₁")
    axes[0][2].set_title("distance of the spectra")
    axes[0][2].set_ylim(bottom=0)
    for ax in axes[0]:
        ax.set_xticks(x, ticks)
        ax.legend()
        ax.grid(visible=True)
    return figure


def _line(
    ax: Axes, x: np.ndarray, found: list[ValueWithError], look: Look, label: str, width: float = 1.4
) -> None:
    """Draw a line with error bars; quantities that were not measured are omitted."""
    values = np.array([number.value for number in found])
    if not np.isfinite(values).any():
        return
    drawn = {"color": look.color, "ls": look.dash, "marker": look.mark, "ms": 3.5, "lw": width}
    ax.errorbar(x, values, yerr=np.nan_to_num([n.error for n in found]), label=label, elinewidth=1, **drawn)


def _figure_blocks(result: Gap) -> Figure:
    height = 1.4 + 0.32 * len(result.blocks)
    figure, axes = style.subplots(1, 2, figsize=(4.2 + 1.6 * len(result.checkpoints), height), squeeze=False)
    cells = [[result.pair(name, block) for name in result.checkpoints] for block in result.blocks]
    gaps = np.array([[100 * pair.gap().value for pair in row] for row in cells])
    shares = np.array([[pair.share().value for pair in row] for row in cells])
    top = float(np.nanmax(np.abs(gaps), initial=1e-12))
    limits = ({"vmin": -top, "vmax": top, "cmap": style.SIGNED}, {"vmin": 0, "cmap": style.MAP})
    titles = {"λ_max missing in the GGN (%)": "+.1f", "functional share ‖H_f‖/‖H‖": ".2f"}
    panels = zip(axes[0], (gaps, shares), limits, titles.items(), strict=True)
    for ax, values, options, (title, digits) in panels:
        ax.imshow(np.ma.masked_invalid(values), aspect="auto", **options)
        style.write_cells(ax, f"{{:{digits}}}".format, missing="–")
        ax.set_xticks(range(len(result.checkpoints)), result.checkpoints)
        ax.set_yticks(range(len(result.blocks)), result.blocks)
        ax.set_title(title)
        ax.tick_params(length=0)
    return figure


def _densities(result: Gap) -> Figure:
    """Draw the shares above |λ| on both sides of zero, on logarithmic axes, in one row of panels."""
    count = len(result.checkpoints)
    figure, axes = style.subplots(1, count, figsize=(3.2 * count + 0.8, 3.4), sharey=True, squeeze=False)
    for ax, name in zip(axes[0], result.checkpoints, strict=True):
        pair = result.pair(name)
        for part, title in NAMES.items():
            for sign, dash in ((1, "-"), (-1, ":")):
                x, share = _tail(pair.densities[part], sign)
                if len(x):
                    label = f"{title}, {'λ > 0' if sign > 0 else 'λ < 0'}"
                    ax.step(x, share, where="pre", color=LOOKS[part].color, ls=dash, lw=1.3, label=label)
        ax.set(xscale="log", yscale="log")
        ax.set_xlim(left=1e-4 * max(float(d.extremes[1]) for d in pair.densities.values()))
        ax.set_xlabel("|λ|")
        value, error = pair.wasserstein()
        ax.set_title(f"{name}: W₁ = {value:.2f} ± {error:.2f} rms")
        ax.grid(visible=True)
    axes[0][0].set_ylabel("share of eigenvalues beyond")
    axes[0][0].legend()
    return figure


def _tail(d: SpectralDensity, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ascending |λ|, and the share of eigenvalues of this sign with at least this size."""
    nodes, weights = sign * d.nodes.ravel(), d.weights.ravel() / len(d.nodes)
    order = np.argsort(nodes)
    order = order[nodes[order] > 0]
    return nodes[order], np.cumsum(weights[order][::-1])[::-1]


def _figure_targets(result: Gap) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(9, 3.6), squeeze=False)
    pairs = {"own": result.pair(result.checkpoints[-1]), **result.targets}
    left, right = axes[0]
    for i, (name, pair) in enumerate(pairs.items()):
        value, error = pair.share()
        look, bar = style.look(i), np.nan_to_num(error)
        left.errorbar(pair.loss, value, yerr=bar, fmt=look.mark, color=look.color, label=name)
    left.set(xlabel="loss", ylabel="‖H_f‖/‖H‖")
    left.set_ylim(bottom=0)
    left.set_title("other targets, parameters fixed")
    left.legend()
    if result.draws is not None:
        counts, norms = result.draws.shrinking()
        right.plot(counts, norms, "o", color=PALETTE[0], label="‖mean of H_f‖")
        right.plot(counts, 1 / np.sqrt(counts), color="0.5", lw=1, label="1/√draws")
        right.set_xscale("log", base=2)
        right.set_yscale("log", base=2)
        right.set_xticks(counts, [f"{count:g}" for count in counts])
        right.set_yticks(2.0 ** -np.arange(3), ["1", "0.5", "0.25"])
        right.set(
            ylim=(0.9 * min(norms.min(), counts[-1] ** -0.5), 1.15),
            xlabel="draws of targets from the model",
            title="the functional Hessian averages out",
        )
        right.legend()
    for ax in axes[0]:
        ax.grid(visible=True)
    return figure


SHARE, TOP, DISTANCE = "functional share", "λ_max", "distance of spectra"
MISSED = "λ_max missed by the GGN"


def scenes(result: Gap) -> dict[str, Scene]:
    """Return scenes over the checkpoints, and by block."""
    measured = any(result.pair(name).distance is not None for name in result.checkpoints)
    choices = [SHARE, TOP, *([DISTANCE] if measured else [])]
    over_training = switched({"quantity": choices}, lambda chosen: _course(result, chosen))
    blocks = switched({"quantity": [MISSED, SHARE]}, lambda chosen: _scene_blocks(result, chosen))
    return {"over_training": over_training, "blocks": blocks}


def _course(result: Gap, quantity: str) -> Scene:
    pairs = [result.pair(name) for name in result.checkpoints]
    if quantity == SHARE:
        found = [
            _curve(block, [result.pair(name, block).share() for name in result.checkpoints], result)
            for block in result.blocks
        ]
        y = axis("functional share ‖H_f‖ / ‖H‖", rangemode="tozero")
    elif quantity == TOP:
        found = [
            _curve(title, [pair.top(part) for pair in pairs], result, LOOKS[part])
            for part, title in (("hessian", "Hessian"), ("ggn", "GGN"))
        ]
        y = log_axis("λ_max of the whole model", [curve.y for curve in found])
    else:
        gray = Look(GRAY, ":", "D")
        found = [
            _curve("W₁ of the spectra of H and GGN", [p.wasserstein() for p in pairs], result, LOOKS["ggn"]),
            _curve("its bound, the functional share", [p.share() for p in pairs], result, gray),
        ]
        y = axis("distance, in units of ‖H‖ / √n", rangemode="tozero")
    return curves(found, x=over(result.checkpoints, "checkpoint"), y=y)


def _curve(name: str, found: list[ValueWithError], result: Gap, look: Look | None = None) -> Curve:
    values, errors = (np.array([getattr(n, key) for n in found]) for key in ("value", "error"))
    losses = [result.pair(checkpoint).loss for checkpoint in result.checkpoints]
    words = [
        f"<b>{name}</b>, {checkpoint}<br>{said(*number)}<br>loss {loss:.3f}"
        for checkpoint, number, loss in zip(result.checkpoints, found, losses, strict=True)
    ]
    x = np.arange(len(found), dtype=float)
    return Curve(name, x, values, words, values - errors, values + errors, look=look)


def _scene_blocks(result: Gap, quantity: str) -> Scene:
    def cell(block: str, checkpoint: str) -> Cell:
        pair = result.pair(checkpoint, block)
        if quantity == SHARE:
            number, unit = pair.share(), ""
        else:
            number, unit = ValueWithError(*(100 * part for part in pair.gap())), " %"
        return Cell(number.value, f"<b>{block}</b>, {checkpoint}<br>{quantity}: {said(*number)}{unit}")

    cells = [[cell(block, name) for name in result.checkpoints] for block in result.blocks]
    label = "functional share ‖H_f‖ / ‖H‖" if quantity == SHARE else "λ_max missing in the GGN (%)"
    colors = "linear" if quantity == SHARE else "signed linear"
    return grid_map(result.blocks, result.checkpoints, cells, label=label, colors=colors)


def summary(result: Gap) -> list[Line]:
    """Return the key numbers: label, value, explanation."""
    last = result.checkpoints[-1]
    pair = result.pair(last)
    words = f"{result.loss_name} over {result.num_terms:g} terms of {result.data}, at {last}"
    found: list[Line] = [("loss", f"{pair.loss:.4f}", words), *whole(pair)]
    if len(result.checkpoints) > 1:
        found.append(_caption_over_training(result))
    found += _caption_blocks(result, last)
    if result.targets:
        found.append(_caption_targets(result))
    if result.draws is not None:
        value, error = result.draws.expectation()
        words = (
            f"‖E H_f‖² / E‖H_f‖² over {plural(result.draws.gram.shape[1], 'draw')} of targets from the "
            "model: zero in theory; ± is a standard error"
        )
        found.append(("functional Hessian of drawn targets", with_error(value, error), words))
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: Gap) -> str:
    """Summarize how much of the Hessian the GGN omits, at the last and the first checkpoint."""
    last = result.checkpoints[-1]
    pair = result.pair(last)
    said = f"The GGN omits the functional Hessian, whose norm is {with_error(*pair.share())} of ‖H‖ at {last}"
    if np.isfinite(pair.gap().value):
        said += f"; the GGN's λ_max is {off(*pair.gap_interval())} the Hessian's"
    if len(result.checkpoints) == 1:
        return f"{said}."
    first = result.checkpoints[0]
    return f"{said}. At {first} the share was {with_error(*result.pair(first).share())}."


def off(low: float, high: float) -> str:
    """Format both ends of 1 − λ_max(H_o)/λ_max(H), for example `25.1 to 27.6 % below`."""
    if low < 0 < high:
        return f"between {rounded(-100 * low, 3)} % above and {rounded(100 * high, 3)} % below"
    near, far = sorted((abs(100 * low), abs(100 * high)))
    return f"{between(near, far, 3)} % {'below' if high > 0 else 'above'}"


def _percent(pair: Pair) -> str:
    """Format the interval of 1 − λ_max(H_o)/λ_max(H), for example `25.1 to 27.6 %`."""
    low, high = pair.gap_interval()
    return f"{between(100 * low, 100 * high, 3)} %"


def whole(pair: Pair) -> list[Line]:
    """Return lines on the whole model: both λ_max, norms, traces, spectra."""
    h, g = pair.hessian.ends, pair.ggn.ends
    assert h is not None
    assert g is not None
    found = [
        (
            "λ_max, H against H_o",
            _percent(pair),
            f"1 − λ_max(H_o)/λ_max(H); λ_max {between(float(h.values[1]), h.high)} and "
            f"{between(float(g.values[1]), g.high)}; {LIES_BETWEEN}",
        ),
        (
            "functional share",
            with_error(*pair.share()),
            f"‖H_f‖/‖H‖; norms {with_error(pair.functional.norm, pair.functional.norm_stderr)} and "
            f"{with_error(pair.hessian.norm, pair.hessian.norm_stderr)}",
        ),
        (
            "trace, H_f of H",
            with_error(*pair.trace_gap()),
            f"tr H_f / tr H; traces {with_error(pair.functional.trace, pair.functional.trace_stderr)} and "
            f"{with_error(pair.hessian.trace, pair.hessian.trace_stderr)}",
        ),
    ]
    if pair.distance is not None:
        words = (
            f"bias-corrected W₁ of the spectra of H and H_o in units of ‖H‖/√n = {pair.scale:.3g}; at "
            "most the functional share"
        )
        found.append(("Wasserstein distance", with_error(*pair.wasserstein()), words))
    return found


def _caption_over_training(result: Gap) -> Line:
    each = [
        f"{name} {with_error(*pair.share())} (loss {pair.loss:.2f}, λ_max gap {100 * pair.gap().value:.2g} %)"
        for name, pair in ((name, result.pair(name)) for name in result.checkpoints)
    ]
    first, last = (result.pair(result.checkpoints[i]).share().value for i in (0, -1))
    return ("share over training", f"× {last / first:.2g}", ", ".join(each))


def _caption_blocks(result: Gap, checkpoint: str) -> list[Line]:
    """Return the blocks with the largest and the smallest relative gap."""
    gaps = {b: result.pair(checkpoint, b).gap() for b in result.blocks[1:]}
    known = {b: gap for b, gap in gaps.items() if np.isfinite(gap.value)}
    if not known:
        return []
    order = sorted(known, key=lambda b: -abs(known[b].value))
    each = [f"{b} {_percent(result.pair(checkpoint, b))}" for b in order]
    words = f"share of λ_max missing in the GGN at {checkpoint}: {', '.join(each[:6])}"
    return [("worst block", order[0], words)]


def _caption_targets(result: Gap) -> Line:
    own = result.pair(result.checkpoints[-1])
    each = {"own": own, **result.targets}
    said = [f"{name} {with_error(*p.share())} (loss {p.loss:.2f})" for name, p in each.items()]
    least = result.targets["predicted"].share().value
    ratio = result.targets["random"].share().value / least if least > 0 else np.inf
    words = f"times the share with random targets, of that with predicted ones: {', '.join(said)}"
    return ("share by targets", f"{ratio:.2g}", words)


WHAT = (
    "H = H_o + H_f, H_o the GGN and H_f the functional Hessian. λ_max is from Lanczos steps: an eigenvalue "
    "lies within the error, and the largest is below high with 95 % confidence; λ_max gap is 1 − "
    "λ_max(H_o)/λ_max(H). Traces and Frobenius norms with standard errors and 95 % intervals over probes; "
    "trace gap is tr H_f/tr H; functional share is ‖H_f‖/‖H‖. Wasserstein: W₁ between the spectra of H and "
    "H_o, in units of the root mean square eigenvalue ‖H‖/√n, at most the functional share; its error "
    "combines the error over probes (stderr, and a 95 % interval) and the change over the last half of the "
    "Lanczos steps (from minimum to maximum); unresolved bounds the remaining error of the Lanczos steps."
)


def captions(result: Gap) -> dict[str, str]:
    """Return a caption for each figure and table."""
    where = "every checkpoint" if len(result.checkpoints) > 1 else "the given model"
    found = {
        "gap": f"One row per checkpoint and block; 'all' is the whole model. {WHAT}",
        "training": f"The whole model at {where}. {WHAT}",
        "over_training": f"Functional share, λ_max of H and H_o, and Wasserstein distance at {where}; "
        "bars are errors over probes; for λ_max they are residuals, within which an eigenvalue lies.",
        "blocks": f"By block, at {where}: share of λ_max that the GGN misses, in percent (negative: the "
        "GGN's λ_max is too large), and the functional share ‖H_f‖/‖H‖.",
    }
    if result.pair(result.checkpoints[-1]).densities:
        found["densities"] = (
            "Share of eigenvalues above |λ|, on either side of zero, of the Hessian and the GGN, at "
            f"{where}: quadratures of all probes, without broadening. W₁ is the area between the two "
            "curves on linear axes."
        )
    if result.targets:
        text = (
            "The whole model at the last checkpoint with fixed parameters and other targets. Predicted: "
            "the likeliest classes, or the outputs themselves; drawn: samples from the model's "
            "distribution; random: independent of the input."
        )
        found["targets"] = f"{text} {WHAT}"
        found["other_targets"] = (
            f"{text} Left: functional share against the loss. Right: norm of the mean of H_f over draws "
            "of targets from the model, relative to a single draw; 1/√draws if the expectation is zero."
        )
    return found
