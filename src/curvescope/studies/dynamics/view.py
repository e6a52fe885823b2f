"""Tables, claims, figures and captions of the study `dynamics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.number_format import plural, rounded, with_error
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Origin, Tables, count_verdicts
from curvescope.studies.common.statistics import OURS, of_runs
from curvescope.studies.dynamics.analysis import (
    GENERALIZED,
    MEMORIZED,
    NEAR,
    SIGNALS,
    SPIKE,
    Approach,
    Course,
    alarms,
    approach,
    change,
    false_alarms,
    later_loss,
    onset,
    phases,
    rise,
    warned,
)
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, Curve, curves, grid_map, said, switched
from curvescope.viz.scenes.curves import axis, over
from curvescope.viz.style import LOOKS
from curvescope.viz.style import PALETTE as SERIES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.dynamics.analysis import Sequence
    from curvescope.studies.dynamics.study import Dynamics


def opening(result: Dynamics) -> str:
    """Summarize checkpoints, or the claims about runs."""
    return count_verdicts(result) if result.sequence is None else over_checkpoints(result.sequence)


def scenes(result: Dynamics) -> dict[str, Scene]:
    """Return interactive scenes by name."""
    return {} if result.sequence is None else _checkpoint_scenes(result.sequence)


SEEN = (
    "step", "loss", "grad_norm", "lambda_max", "lambda_max_error", "lambda_min", "lambda_min_error", "trace",
    "trace_stderr", "ggn_lambda_max", "ggn_gap", "lr", "lr_lambda_max", "threshold", "lr_sharpness",
    "sharpness_threshold", "grad_share", "curvature_along_gradient", "overlap",
)  # fmt: skip
OF_CHECKPOINTS = ("loss", "grad_norm", *SEEN[3:11], "grad_share", "curvature_along_gradient", "converged")


def tables(result: Dynamics) -> Tables:
    """Return `claims`, `runs`, `measurements` and `alarms`; or `checkpoints` and `blocks`."""
    import pandas as pd

    if result.sequence is not None:
        return _of_sequence(result)
    found = {
        "claims": result.claims(),
        "runs": [_row(run) for run in result.courses.values()],
        "measurements": pd.concat([_measurements(run) for run in result.courses.values()]),
    }
    if result.of("spikes"):
        found["alarms"] = alarm_rows(result)
    return found


def _row(run: Course) -> dict[str, Any]:
    way, spike = approach(run), onset(run)
    reached = None if way.reached is None else int(way.steps[way.reached])
    return {
        "run": run.name,
        "optimizer": run.optimizer,
        "lr": run.lr[-1] if len(run.lr) else np.nan,
        "steps": len(run.loss) - 1,
        "first_loss": run.loss[0],
        "last_loss": run.loss[-1],
        "lambda_max_first": run.column("lambda_max")[0],
        "lambda_max_last": run.column("lambda_max")[-1],
        "reached": np.nan if reached is None else reached,
        "after": np.median(way.after) if len(way.after) else np.nan,
        "spike": np.nan if spike is None else spike,
    }


def _measurements(run: Course) -> pd.DataFrame:
    import pandas as pd

    found = pd.DataFrame({name: run.column(name) for name in SEEN})
    found.insert(0, "run", run.name)
    if len(run.evaluated):
        found["accuracy"], found["held_out_accuracy"] = run.accuracy, run.held_out_accuracy
        found["held_out_loss"] = run.held_out_loss
    return found


def alarm_rows(result: Dynamics) -> list[dict[str, Any]]:
    """Return one row per signal: spikes it warned of, lead in steps, and false alarms."""
    above = [run for run in result.of("spikes", "above") if onset(run) is not None]
    leads = {signal: [] for signal in SIGNALS}
    for run in above:
        for one in warned(run):
            leads[one.signal].append(one.lead)
    groups = {"below": result.of("spikes", "below"), "at_edge": result.of("edge")}
    false = {name: false_alarms([c for c in runs if onset(c) is None]) for name, runs in groups.items()}
    rows = []
    for signal, words in SIGNALS.items():
        early = [lead for lead in leads[signal] if lead]
        row: dict[str, Any] = {"signal": signal, "spikes": len(above), "warned": len(early)}
        row["lead_steps"] = float(np.median(early)) if early else np.nan
        for name, counts in false.items():
            row |= {f"false_{name}": counts[signal][0], f"measured_{name}": counts[signal][1]}
        rows.append(row | {"meaning": words})
    return rows


def _of_sequence(result: Dynamics) -> dict[str, pd.DataFrame]:
    import pandas as pd

    sequence = result.sequence
    assert sequence is not None
    table = pd.DataFrame({name: sequence.column(name) for name in OF_CHECKPOINTS})
    table.insert(0, "step", sequence.steps)
    table.insert(0, "checkpoint", sequence.names)
    blocks = [
        pd.DataFrame(one.blocks).assign(checkpoint=name)
        for name, one in zip(sequence.names, sequence.seen, strict=True)
    ]
    columns = ["checkpoint", "block", "lambda_max", "lambda_max_error", "converged", "trace", "trace_stderr"]
    return {"checkpoints": table, "blocks": pd.concat(blocks).reindex(columns=columns)}


GD: Origin = ("Cohen et al. 2021", "paper")
ADAM: Origin = ("Cohen et al. 2022", "paper")
GROK: Origin = ("Power et al. 2022", "paper")
ENOUGH = 0.8  # minimum share of measurements near the threshold
FALLEN = 0.9  # maximum ratio of the losses
SURE = 0.05  # level of a one-sided test
LONG = 20  # measurements after which a run without a rise counts as a failure


def claims(result: Dynamics) -> list[Claim]:
    """Return all claims."""
    found: list[Claim] = []
    if runs := result.of("edge"):
        found += _claim_edge(runs)
    if runs := result.of("adam"):
        found += _claim_adam(runs[0])
    if result.of("warmup"):
        found += _claim_warmup(result)
    if result.of("spikes"):
        found += _claim_spikes(result)
    if runs := result.of("grokking"):
        found += _claim_grokking(runs)
    return found


def _claim_edge(runs: list[Course]) -> list[Claim]:
    ways = [approach(run) for run in runs]
    return [
        Claim(
            "λ_max rises until it reaches 2/η", "progressive sharpening", _each(ways, _rise),
            _reached(ways), *GD,
        ),
        Claim(
            f"it then stays within {100 * NEAR:.0f} % of 2/η", "hovers just above it", _each(ways, _stay),
            _stays(ways), *GD,
        ),
        Claim(
            "the loss falls over long times, non-monotonically", "it does",
            "; ".join(map(_loss_words, runs, ways)), _falls(runs, ways), *GD,
        ),
    ]  # fmt: skip


def _claim_adam(run: Course) -> list[Claim]:
    way, h = approach(run), run.seen.history
    threshold = float(np.nanmax(h["sharpness_threshold"]))
    start = 0 if way.reached is None else int(np.flatnonzero(run.measured == way.steps[way.reached])[0])
    first, last = h["lambda_max"][start], h["lambda_max"][-1]
    errors = h["lambda_max_error"][start] + h["lambda_max_error"][-1]
    verdict = OPEN if way.reached is None else HOLDS if last - first > errors else FAILS
    return [
        Claim(
            f"Adam: the preconditioned sharpness reaches {threshold:.0f}/η", "it rises to it",
            _rise(way), _reached([way]), *ADAM,
        ),
        Claim(
            f"it then stays within {100 * NEAR:.0f} % of {threshold:.0f}/η", "equilibrates there", _stay(way),
            _stays([way]), *ADAM,
        ),
        Claim(
            "λ_max itself continues to rise meanwhile", "it may", f"from {first:.3g} to {last:.3g}",
            verdict, *ADAM,
        ),
    ]  # fmt: skip


def _each(ways: list[Approach], words) -> str:
    return "; ".join(words(way) for way in ways)


def _rise(way: Approach) -> str:
    low = f"from {way.ratio[way.lowest]:.2f} of the threshold at step {way.steps[way.lowest]}"
    if way.reached is None:
        return f"{low} to {way.ratio[-1]:.2f} at step {way.steps[-1]}, the last"
    ratio, error = way.ratio[way.reached], way.error[way.reached]
    return f"{low} to {ratio:.2f} (± {error:.1g}) at step {way.steps[way.reached]}"


def _reached(ways: list[Approach]) -> str:
    if all(way.reached is not None and way.rises for way in ways):
        return HOLDS
    fell = all(way.reached is None and not way.rises and len(way.ratio) >= LONG for way in ways)
    return FAILS if fell else OPEN


def _stay(way: Approach) -> str:
    if len(way.after) < 2:
        return "not reached" if way.reached is None else "reached at the end"
    low, middle, high = np.quantile(way.after, [0.1, 0.5, 0.9])
    many = plural(len(way.after), "measurement")
    return f"median {middle:.2f} of the threshold, 80 % of {many} between {low:.2f} and {high:.2f}"


def _stays(ways: list[Approach]) -> str:
    known = [way for way in ways if len(way.after) >= 4]
    if not known:
        return OPEN
    good = [way.near >= ENOUGH for way in known]
    return of_runs(good)


def _loss_words(run: Course, way: Approach) -> str:
    if way.reached is None:
        return "not reached"
    ratio, up = later_loss(run, int(way.steps[way.reached]))
    return f"× {ratio:.2f} from there on; the loss rose on {100 * up:.0f} % of the steps"


def _falls(runs: list[Course], ways: list[Approach]) -> str:
    known = [
        later_loss(run, int(way.steps[way.reached]))
        for run, way in zip(runs, ways, strict=True)
        if way.reached
    ]
    if not known:
        return OPEN
    good = [ratio <= FALLEN and up > 0 for ratio, up in known]
    return of_runs(good)


def _claim_warmup(result: Dynamics) -> list[Claim]:
    from scipy import stats

    kinds = {way: result.of("warmup", way) for way in ("without", "with")}
    (a, n), (b, m) = ((sum(onset(run) is not None for run in runs), len(runs)) for runs in kinds.values())
    counts: Any = stats.fisher_exact([[a, n - a], [b, m - b]], alternative="greater")
    p = float(counts.pvalue)
    rises = [np.array([rise(run) for run in runs]) for runs in kinds.values()]
    middle = [float(np.median(each)) for each in rises]
    logs = np.log(rises[0]) - np.log(rises[1])
    signs: Any = stats.wilcoxon(logs, alternative="greater") if logs.any() else None
    paired = 1.0 if signs is None else float(signs.pvalue)
    return [
        Claim(
            "the run spikes without warm-up, but not with it", "fewer spikes with it",
            f"spikes in {a} of {n} without, {b} of {m} with; one-sided p = {p:.2g}",
            HOLDS if p < SURE else FAILS if b > a else OPEN, *OURS,
        ),
        Claim(
            "with warm-up the loss rises less above its minimum", "less",
            f"at most × {middle[0]:.3g} without, × {middle[1]:.3g} with (medians); paired p = {paired:.2g}",
            HOLDS if paired < SURE else FAILS if middle[1] > middle[0] else OPEN, *OURS,
        ),
    ]  # fmt: skip


def _claim_spikes(result: Dynamics) -> list[Claim]:
    above, below = result.of("spikes", "above"), result.of("spikes", "below")
    spiked = [run for run in above if onset(run) is not None]
    leads = [next(w.lead for w in warned(run) if w.signal == "sharpness") for run in spiked]
    words = f"{plural(len(spiked), 'spike')} in {plural(len(above), 'run')}, "
    words += f"{', '.join(map(str, leads))} steps earlier" if leads else "no spikes"
    verdict = OPEN if not leads else HOLDS if min(leads) > 0 else FAILS
    quiet = [run for run in below if onset(run) is None]
    count, total = false_alarms(quiet)["sharpness"]
    found = [
        Claim("η λ_max is above its threshold before the loss spikes", "before", words, verdict, *OURS),
        Claim(
            "below the limit it gives no false alarm", "none",
            f"{count} alarms in {total} measurements of {plural(len(quiet), 'run')} without a spike",
            OPEN if not total else FAILS if count else HOLDS, *OURS,
        ),
    ]  # fmt: skip
    edge = [run for run in result.of("edge") if onset(run) is None]
    if edge:
        count, total = false_alarms(edge)["sharpness"]
        words = (
            f"{count} of {total} measurements at the edge are above 2, and no spike of {SPIKE:g} times "
            "followed"
        )
        found.append(Claim("η λ_max > 2 implies a spike", "ours", words, FAILS if count else OPEN, *OURS))
    return found


def _claim_grokking(runs: list[Course]) -> list[Claim]:
    found = [phases(run) for run in runs]
    said = []
    for run, one in zip(runs, found, strict=True):
        at = [None if i is None else int(run.evaluated[i]) for i in (one.memorized, one.generalized)]
        said.append(f"memorized at step {at[0]}, generalized at {at[1]}")
    grokked = [one.delayed for one in found]
    verdict = HOLDS if all(grokked) else OPEN  # more steps could show it
    return [
        Claim(
            "the model generalizes long after it has memorized", "it does", "; ".join(said), verdict, *GROK
        ),
        _changed(runs, "λ_max falls when the model groks", per_loss=False),
        _changed(runs, "λ_max falls more than the loss does", per_loss=True),
    ]


def _changed(runs: list[Course], claim: str, *, per_loss: bool) -> Claim:
    moves = [move for run in runs if (move := change(run, "lambda_max", per_loss=per_loss)) is not None]
    what = "λ_max/L" if per_loss else "λ_max"
    words = (
        "; ".join(f"{what} × {m.value:.2g} ({m.low:.2g} to {m.high:.2g})" for m in moves) or "none grokked"
    )
    signs = {move.direction for move in moves}
    verdict = HOLDS if signs == {-1} else FAILS if signs == {1} else OPEN
    return Claim(claim, "flatter", words, verdict, *OURS)


# ----------------------------------------------------------------------------------------- checkpoint figures

TALL = 60  # maximum number of blocks with labels
QUANTITIES = {
    "lambda_max": ("λ_max", "lambda_max_error"),
    "lambda_min": ("λ_min", "lambda_min_error"),
    "trace": ("trace", "trace_stderr"),
    "loss": ("loss", None),
}
SWITCH = {title: (name, error) for name, (title, error) in QUANTITIES.items()}
OF_BLOCKS = {"λ_max": ("lambda_max", "lambda_max_error"), "trace": ("trace", "trace_stderr")}
BLOCK_MAP = (
    "of every measured block, at every checkpoint. The color scale is logarithmic, on both sides of "
    "zero if both signs occur."
)


def plain(ax: Axes, title: str = "") -> None:
    """Add a light grid and a title."""
    ax.grid(visible=True)
    ax.set_title(title)


def draw(sequence: Sequence) -> dict[str, Figure]:
    """Draw quantities over checkpoints, and λ_max of single blocks."""
    found = {"over_checkpoints": _course(sequence)}
    blocks, values = sequence.block_map()
    if blocks and np.isfinite(values).any():
        found["block_map"] = _map(sequence, blocks, values)
    return found


def _course(sequence: Sequence) -> Figure:
    figure, axes = style.subplots(1, len(QUANTITIES), figsize=(13.2, 3.4), squeeze=False)
    x = np.arange(len(sequence.names))
    for i, (ax, (name, (title, error))) in enumerate(zip(axes[0], QUANTITIES.items(), strict=True)):
        errors = None if error is None else np.nan_to_num(sequence.column(error))
        look = {"fmt": "-o", "ms": 4, "lw": 1.3, "color": SERIES[i % len(SERIES)]}
        ax.errorbar(x, sequence.column(name), yerr=errors, **look)
        ax.set_xticks(x, sequence.names, rotation=30 if len(x) > 4 else 0)
        plain(ax, title)
    return figure


def _map(sequence: Sequence, blocks: list[str], values: np.ndarray) -> Figure:
    from matplotlib.colors import LogNorm

    size = (3 + 0.8 * len(sequence.names), 1.5 + 0.17 * min(len(blocks), 120))
    figure, ax = style.subplots(figsize=size)
    known = np.ma.masked_less_equal(np.ma.masked_invalid(values), 0)
    look = {"norm": LogNorm()} if known.count() else {}
    image = ax.imshow(known, aspect="auto", cmap=style.MAP, interpolation="nearest", **look)
    ax.set_xticks(range(len(sequence.names)), sequence.names, rotation=30)
    stride = max(1, -(-len(blocks) // TALL))
    ax.set_yticks(range(0, len(blocks), stride), blocks[::stride])
    ax.tick_params(length=0)
    ax.set_title("λ_max of single blocks")
    figure.colorbar(image, ax=ax, shrink=0.6)
    return figure


def _checkpoint_scenes(sequence: Sequence) -> dict[str, Scene]:
    """Return scenes of quantities over checkpoints, and a map of blocks."""
    found = {"over_checkpoints": switched({"quantity": list(SWITCH)}, lambda q: _course_scene(sequence, q))}
    known = [q for q, (name, _) in OF_BLOCKS.items() if np.isfinite(sequence.block_map(name)[1]).any()]
    if known:
        made = switched({"quantity": known}, lambda q: _map_scene(sequence, q))
        found["block_map"] = made | {"caption": f"{' or '.join(known)} {BLOCK_MAP}"}
    return found


def _course_scene(sequence: Sequence, quantity: str) -> Scene:
    name, error = SWITCH[quantity]
    values = sequence.column(name)
    errors = np.full(len(values), np.nan) if error is None else sequence.column(error)
    words = [
        f"<b>{point}</b><br>{quantity}: {said(value, e)}"
        for point, value, e in zip(sequence.names, values.tolist(), errors.tolist(), strict=True)
    ]
    look = LOOKS["loss" if quantity == "loss" else "hessian"]
    x = np.arange(len(values), dtype=float)
    curve = Curve(quantity, x, values, words, values - errors, values + errors, look=look)
    title = quantity if quantity == "loss" else f"{quantity} of H"
    scene = curves([curve], x=over(sequence.names, "checkpoint"), y=axis(title))
    return {**scene, "layout": {**scene["layout"], "showlegend": False}}


def _map_scene(sequence: Sequence, quantity: str) -> Scene:
    name, error = OF_BLOCKS[quantity]
    blocks, values = sequence.block_map(name)
    errors = dict(zip(*sequence.block_map(error), strict=True))
    unknown = np.full(len(sequence.names), np.nan)
    cells = [
        [
            Cell(value, f"<b>{block}</b>, {point}<br>{quantity}: {said(value, e)}")
            for point, value, e in zip(sequence.names, row, errors.get(block, unknown).tolist(), strict=True)
        ]
        for block, row in zip(blocks, values.tolist(), strict=True)
    ]
    label = f"{quantity} of the block"
    return grid_map(blocks, sequence.names, cells, label=label, colors="signed")


def figures(result: Dynamics) -> dict[str, Figure]:
    """Return one figure per experiment; for checkpoints, curves and the map of blocks."""
    if result.sequence is not None:
        return draw(result.sequence)
    found: dict[str, Figure] = {}
    if runs := result.of("edge"):
        found["edge"] = _figure_edge(runs)
    if runs := result.of("adam"):
        found["adam"] = _figure_adam(runs[0])
    if result.of("warmup"):
        found["warmup"] = _figure_warmup(result)
    if result.of("spikes"):
        found["spikes"] = _figure_spikes(result)
    if runs := result.of("grokking"):
        found["grokking"] = _figure_grokking(runs)
    return found


def _with_threshold(ax: Axes, bound: float, words: str) -> None:
    ax.axhspan(bound * (1 - NEAR), bound * (1 + NEAR), color="0.93", lw=0)
    ax.axhline(bound, color="0.3", lw=1, ls="--", label=words)


def _points(ax: Axes, run: Course, name: str, color: str, label: str) -> None:
    errors = run.seen.history.get(f"{name}_error")
    ax.errorbar(
        run.measured, run.column(name), yerr=None if errors is None else np.nan_to_num(errors), fmt="-o",
        ms=3, lw=1.2, color=color, label=label,
    )  # fmt: skip


def _loss(ax: Axes, run: Course, color: str = PALETTE[0], **options: Any) -> None:
    ax.plot(np.arange(len(run.loss)), run.loss, color=color, **{"lw": 1.0, **options})
    ax.set(yscale="log", xlabel="step")


def _figure_edge(runs: list[Course]) -> Figure:
    figure, axes = style.subplots(
        2, len(runs), figsize=(1 + 4.3 * len(runs), 5.4), sharex=True, squeeze=False
    )
    for j, run in enumerate(runs):
        rate = float(run.lr[-1])
        top, bottom = axes[0][j], axes[1][j]
        _with_threshold(top, 2 / rate, f"2/η = {2 / rate:.1f}")
        _points(top, run, "lambda_max", PALETTE[1], "λ_max")
        plain(top, f"gradient descent, η = {rate:.3g}")
        top.set_ylim(bottom=0)
        top.legend(loc="lower right")
        _loss(bottom, run)
        plain(bottom)
    axes[0][0].set_ylabel("λ_max")
    axes[1][0].set_ylabel("loss")
    return figure


def _figure_adam(run: Course) -> Figure:
    figure, axes = style.subplots(2, 2, figsize=(9.6, 5.4), sharex=True, squeeze=False)
    rate = float(run.lr[-1])
    bound = float(np.nanmax(run.column("sharpness_threshold"))) / rate
    _with_threshold(axes[0][0], bound, f"{bound * rate:.0f}/η = {bound:,.0f}")
    _points(axes[0][0], run, "sharpness", PALETTE[1], "λ_max of P^(−½) H P^(−½)")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].legend(loc="lower right")
    _points(axes[0][1], run, "lambda_max", PALETTE[0], "λ_max of H")
    axes[0][1].set_ylim(bottom=0)
    plain(axes[0][0], f"Adam, η = {rate:.3g}: preconditioned sharpness")
    plain(axes[0][1], "λ_max of H itself")
    _loss(axes[1][0], run)
    axes[1][0].set_ylabel("loss")
    plain(axes[1][0])
    axes[1][1].plot(run.measured, run.column("grad_share"), "-o", ms=3, lw=1.2, color=PALETTE[2])
    axes[1][1].set(xlabel="step", ylim=(-0.02, 1.02))
    plain(axes[1][1], "share of ‖g‖² in the top eigenspace")
    return figure


def _figure_warmup(result: Dynamics) -> Figure:
    figure, axes = style.subplots(2, 2, figsize=(9.6, 5.4), sharex=True, sharey="row", squeeze=False)
    for j, (way, words) in enumerate({"without": "without warm-up", "with": "with warm-up"}.items()):
        runs = result.of("warmup", way)
        for i, run in enumerate(runs):
            color = PALETTE[0] if onset(run) is None else PALETTE[1]
            _loss(axes[0][j], run, color, alpha=0.8, zorder=3 - i)
        spiked = sum(onset(run) is not None for run in runs)
        axes[0][j].set_xlabel("")
        plain(axes[0][j], f"{words}: {spiked} of {len(runs)} runs spike (orange)")
        one = runs[0]
        ratio = one.column("lr_sharpness") / one.column("sharpness_threshold")
        axes[1][j].plot(one.measured, ratio, "-o", ms=3, lw=1.2, color=PALETTE[2])
        axes[1][j].axhline(1, color="0.3", lw=1, ls="--")
        axes[1][j].set(xlabel="step", yscale="log")
        plain(axes[1][j], "η · sharpness over its threshold, first run")
    axes[0][0].set_ylabel("loss")
    return figure


def _figure_spikes(result: Dynamics) -> Figure:
    columns = {"above": result.of("spikes", "above")[0], "below": result.of("spikes", "below")[0]}
    figure, axes = style.subplots(
        3, 2, figsize=(10.4, 6.6), sharex=True, sharey="row", height_ratios=[2, 2, 1.3], squeeze=False
    )
    for j, (way, run) in enumerate(columns.items()):
        loss, ratio, marks = (axes[i][j] for i in range(3))
        _loss(loss, run)
        loss.set_xlabel("")
        plain(loss, f"η rises to {run.lr[-1]:.3g}, {way} the limit")
        ratio.plot(run.measured, run.column("lr_lambda_max"), "-o", ms=3, lw=1.2, color=PALETTE[1])
        ratio.axhline(2, color="0.3", lw=1, ls="--")
        plain(ratio, "η λ_max, threshold 2")
        for i, (_, on) in enumerate(alarms(run).items()):
            marks.plot(run.measured[on], np.full(int(on.sum()), i), "s", ms=4, color=PALETTE[1])
        marks.set_yticks(range(len(SIGNALS)), list(SIGNALS))
        marks.set(ylim=(len(SIGNALS) - 0.5, -0.5), xlabel="step")
        plain(marks, "beyond its threshold")
        if (step := onset(run)) is not None:
            for ax in (loss, ratio, marks):
                ax.axvline(step, color=PALETTE[0], lw=0.8)
    axes[0][0].set_ylabel("loss")
    return figure


def _figure_grokking(runs: list[Course]) -> Figure:
    figure, axes = style.subplots(
        3, len(runs), figsize=(1 + 4.3 * len(runs), 7.2), sharex=True, sharey="row", squeeze=False
    )
    for j, run in enumerate(runs):
        found = phases(run)
        axes[0][j].plot(run.evaluated, run.accuracy, color=PALETTE[0], lw=1.4, label="trained on")
        axes[0][j].plot(run.evaluated, run.held_out_accuracy, color=PALETTE[1], lw=1.4, label="held out")
        axes[0][j].legend(loc="lower right")
        plain(axes[0][j], f"accuracy, seed {run.seed}")
        _points(axes[1][j], run, "lambda_max", PALETTE[1], "")
        plain(axes[1][j], "λ_max of the training loss")
        ratio = run.column("lambda_max") / run.column("loss")
        axes[2][j].plot(run.measured, ratio, "-o", ms=3, lw=1.2, color=PALETTE[2])
        plain(axes[2][j], "λ_max over the loss")
        for ax in (axes[1][j], axes[2][j]):
            ax.set_yscale("log")
        axes[2][j].set_xlabel("step")
        if found.delayed:
            assert found.memorized is not None
            assert found.generalized is not None
            ends = run.evaluated[[found.memorized, found.generalized]]
            for i in range(3):
                axes[i][j].axvspan(*ends, color="0.92", lw=0)
    return figure


def summary(result: Dynamics) -> list[Line]:
    """Return the key numbers: label, value, explanation."""
    found = _sequence(result) if result.sequence is not None else []
    found += [_caption_edge(run) for run in [*result.of("edge"), *result.of("adam")]]
    found += [(claim.verdict, claim.claim, claim.measured) for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def _caption_edge(run: Course) -> Line:
    way = approach(run)
    rate, threshold = float(run.lr[-1]), float(np.nanmax(run.column("sharpness_threshold")))
    bound = f"{threshold:.0f}/η = {threshold / rate:.4g}"
    if way.reached is None:
        words = (
            f"η times the sharpness over {threshold:.0f}, at the last measurement; {bound} was not reached"
        )
        return (run.name, f"{way.ratio[-1]:.2f}", words)
    words = f"median of η times the sharpness over {threshold:.0f}, from step {way.steps[way.reached]} on, "
    return (run.name, f"{np.median(way.after):.2f}", words + f"where {bound} was reached")


def _sequence(result: Dynamics) -> list[Line]:
    one = result.sequence
    assert one is not None
    found: list[Line] = []
    for label, name, error, words in (
        ("λ_max", "lambda_max", "lambda_max_error", "± holds an eigenvalue"),
        ("trace", "trace", "trace_stderr", "± is a standard error"),
    ):
        each = [with_error(*pair) for pair in zip(one.column(name), one.column(error), strict=True)]
        ways = ", ".join(f"{at} {value}" for at, value in zip(one.names[:-1], each[:-1], strict=True))
        before = f", before: {ways}" if ways else ""
        found.append((label, each[-1], f"at {one.names[-1]}{before}; {words}"))
    losses = ", ".join(f"{name} {loss:.4g}" for name, loss in zip(one.names, one.column("loss"), strict=True))
    blocks, values = one.block_map()
    if blocks and np.isfinite(values[:, -1]).any():
        top = int(np.nanargmax(values[:, -1]))
        words = f"λ_max {rounded(values[top, -1])} at {one.names[-1]}, the largest of {one.followed()}"
        found.append(("sharpest block", blocks[top], words))
    return [("loss", f"{one.column('loss')[-1]:.4g}", f"{result.data}: {losses}"), *found]


def over_checkpoints(one: Sequence) -> str:
    """Describe the loss and both ends of the spectrum from the first to the last checkpoint."""
    loss, top, error = (one.column(name) for name in ("loss", "lambda_max", "lambda_max_error"))
    ends = [with_error(float(top[i]), float(error[i])) for i in (0, -1)]
    said = (
        f"From {one.names[0]} to {one.names[-1]} the loss goes from {loss[0]:.3g} to {loss[-1]:.3g} and "
        f"λ_max from {ends[0]} to {ends[1]}"
    )
    peak = int(np.nanargmax(top)) if np.isfinite(top).any() else 0
    if 0 < peak < len(top) - 1:
        said += f", highest at {one.names[peak]} ({rounded(float(top[peak]))})"
    return f"{said}."


HOW = (
    "All runs are deterministic and use all data in every step. The monitor measures on the same data, "
    "before each step, λ_max with its error"
)


def captions(result: Dynamics) -> dict[str, str]:
    """Return a caption for each figure and table."""
    if result.sequence is not None:
        return {
            "checkpoints": "Measurements of every checkpoint: both ends of the spectrum "
            "with their errors, trace ± standard error over probes, λ_max of the GGN, ‖H − H_o‖/‖H‖, the "
            "share of the gradient in the top eigenspace.",
            "blocks": f"λ_max of {result.sequence.followed()} and trace of every block, at every checkpoint.",
            "over_checkpoints": "λ_max, λ_min and trace with their errors, and the loss, over checkpoints.",
            "block_map": f"λ_max of {result.sequence.followed()} at every checkpoint, with logarithmic "
            "colors; empty if it is not positive.",
        }
    band = f"{100 * NEAR:.0f} %"
    return {
        "claims": "Claims of papers about such runs, and measurements; every verdict is computed.",
        "runs": f"{HOW}. reached: the step at which η times the sharpness exceeds its threshold by more "
        "than its error; after: its median from there on, divided by the threshold; spike: the first step "
        f"whose loss is {SPIKE:g} times the lowest before.",
        "measurements": f"{HOW}; columns as in the monitor's history.",
        "alarms": f"Spikes are steps whose loss is {SPIKE:g} times the lowest before. warned: spikes "
        "before which a signal was beyond its threshold at every measurement; lead: steps before the "
        "spike (median); false: measurements beyond the threshold in runs without a spike, below the "
        "limit and at the edge.",
        "edge": f"Gradient descent. {HOW}. Dashed: 2/η; the band is {band} around it. Below: the loss of "
        "every step.",
        "adam": "Adam: λ_max of P^(−½) H P^(−½), with Adam's diagonal P, against 2(1 + β₁)/((1 − β₁) η), "
        f"dashed; the band is {band} around it; λ_max of H itself. Below: the loss of every step.",
        "warmup": "Adam without and with warm-up: loss of every step (top), and η times the "
        "preconditioned sharpness of the first network over its threshold (bottom).",
        "spikes": "Gradient descent whose learning rate rises above 2/λ_max, or stays below it: loss of "
        "every step, η λ_max with its threshold (dashed), and the times at which each signal was beyond "
        "its threshold. Vertical line: the first step of the spike.",
        "grokking": "Addition modulo p: accuracy on the training pairs and on the held-out pairs; λ_max, "
        f"and λ_max over the loss. Shaded: from memorized ({100 * MEMORIZED:.0f} %) to generalized "
        f"({100 * GENERALIZED:.0f} %).",
    }
