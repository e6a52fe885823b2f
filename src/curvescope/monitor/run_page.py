"""One self-contained HTML page of a run: findings, then charts. It is written during the run.

The page needs no other file, no script and no network. During a run the page loads itself again every
half minute; a run that was killed leaves the page of its last measurement behind.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from curvescope.core.number_format import plural, rounded
from curvescope.monitor.diagnosis import RunFinding, diagnose_run, verdict
from curvescope.monitor.run_history import RunHistory, stable_rate

PAGE = "run.html"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 220, 58, 12, 10, 28
MOST_POINTS = 500  # of a line
MOST_BLOCKS = 8
REFRESH_SECONDS = 30
BLUE, RED, GREEN, PURPLE, OCHRE, GRAY = "#2b6cb0", "#c53030", "#2f855a", "#6b46c1", "#b7791f", "#8a94a3"
LEVELS = {"fault": RED, "warning": OCHRE, "note": BLUE}
DECADES = 1.5  # span of the values from which an axis is logarithmic
MOST_DECADES = 8  # that an axis shows: a diverged run has no end


def write_page(folder: Path, about: Mapping[str, str], history: RunHistory, *, finished: bool) -> Path:
    """Write the page into the folder of a run; complete or not at all."""
    page, partial = folder / PAGE, folder / f"{PAGE}.partial"
    partial.write_text(render(about, history, finished=finished), encoding="utf-8")
    partial.replace(page)
    return page


def render(about: Mapping[str, str], history: RunHistory, *, finished: bool) -> str:
    """The text of the page.

    Args:
        about: Facts for the head of the page, by label; `model` is the title.
    """
    findings = diagnose_run(history)
    title = f"Training of {about.get('model', 'a model')}"
    refresh = "" if finished else f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
    last = f"step {history.at[-1]:.0f}" if len(history.at) else "no measurement yet"
    state = "finished" if finished else "as of its last measurement"
    facts = [f"{label} {value}" for label, value in about.items() if label != "model"]
    facts += [plural(len(history.at), "measurement"), last, state]
    charts = "".join(_figure(chart, findings) for chart in _charts(history) if chart.is_known)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_text(title)}</title>'
        f"<style>{STYLE}</style></head><body><main><h1>{_text(title)}</h1>"
        f'<p class="facts">{" · ".join(map(_text, facts))}</p>{_verdict(findings)}{_list(findings)}'
        f"{_rate(history)}<div class='charts'>{charts}{_blocks(history)}</div>"
        f"<p class='foot'>Vertical lines mark the findings. Losses are of the training batches where the "
        f"loop passed them on, and of the probe batches. Written by curvescope.</p></main></body></html>"
    )


def _text(words: object) -> str:
    return html.escape(str(words))


def _verdict(findings: Sequence[RunFinding]) -> str:
    color = LEVELS[findings[0].severity] if findings else GREEN
    return f'<p class="verdict" style="--level:{color}">Diagnosis: {_text(verdict(findings))}</p>'


def _list(findings: Sequence[RunFinding]) -> str:
    items = []
    for number, one in enumerate(findings, start=1):
        remedy = f'<p class="remedy"><b>What to do:</b> {_text(one.remedy)}.</p>' if one.remedy else ""
        reason = f"{one.unit}: {rounded(one.value, 3)}, limit {one.limit:g}: {one.reason}."
        items.append(
            f'<li style="--level:{LEVELS[one.severity]}"><p><span class="badge">{number}</span>'
            f'<span class="level">{one.severity}</span> <b>{_text(one.name.replace("_", " "))}</b>'
            f'<span class="step"> since step {one.step}</span></p><p>{_text(_sentence(one.evidence))}</p>'
            f'{remedy}<p class="reason">{_text(reason)}</p></li>'
        )
    return f'<ol class="findings">{"".join(items)}</ol>' if items else ""


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if not words.startswith("η") else f"{words}."


def _rate(history: RunHistory) -> str:
    rate = stable_rate(history)
    lr = history.column("lr")
    if rate is None:
        return ""
    used = f" The largest rate used was {rounded(float(np.nanmax(lr)), 3)}." if np.isfinite(lr).any() else ""
    return f'<p class="rate">{_text(rate.sentence()[:1].upper() + rate.sentence()[1:])}.{used}</p>'


# ------------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Line:
    """Values over steps, with an error band if the errors are known."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str
    error: np.ndarray | None = None
    thin: bool = False
    dots: bool = True
    hollow: np.ndarray | None = None  # points that do not count


@dataclass(frozen=True)
class Chart:
    """Lines in one pair of axes."""

    title: str
    lines: list[Line]
    level: float = math.nan  # a horizontal line
    level_label: str = ""
    is_share: bool = False  # from 0 to 1, never logarithmic

    @property
    def is_known(self) -> bool:
        """Return True if a value is finite."""
        return any(np.isfinite(line.y).any() for line in self.lines)


def _charts(history: RunHistory) -> list[Chart]:
    at, column = history.at, history.column
    formed = history.is_formed()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = column("lr_sharpness") / column("sharpness_threshold")
        error = ratio * column("sharpness_error") / column("sharpness")
        plain = column("lr_lambda_max") / column("threshold")
    steps, losses = history.steps.get("step", np.zeros(0)), history.steps.get("loss", np.zeros(0))
    if not np.isfinite(ratio).any():
        ratio, error = plain, np.full_like(plain, np.nan)
    return [
        Chart(
            "Loss",
            [
                Line("training batches", *_thinned(steps, losses), GRAY, thin=True, dots=False),
                Line("probe batches", at, column("loss"), BLUE),
            ],
        ),
        Chart(
            "η · sharpness over the optimizer's threshold",
            [Line("hollow: preconditioner not formed yet", at, ratio, GREEN, error, hollow=~formed)],
            1.0,
            "unstable above",
        ),
        Chart(
            "Largest eigenvalue of the Hessian",
            [Line("λ_max", at, column("lambda_max"), BLUE, column("lambda_max_error"))],
        ),
        Chart("Gradient norm on the probe batches", [Line("‖∇L‖", at, column("grad_norm"), PURPLE)]),
        Chart("Largest attention score", [Line("|q·k|/√d", at, column("attention_logit_max"), OCHRE)]),
        Chart(
            "Attention entropy, over that of equal weights",
            [
                Line("mean", at, column("attention_entropy"), BLUE),
                Line("lowest head", at, column("attention_entropy_min"), RED),
            ],
            is_share=True,
        ),
        Chart("Norm of the weights", [Line("‖θ‖", at, column("weight_norm"), BLUE)]),
        Chart("Learning rate", [Line("η", at, column("lr"), GRAY)]),
    ]


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thin a line to MOST_POINTS: the largest value of each share, so that a spike is seen."""
    if len(x) <= MOST_POINTS:
        return x, y
    shares = np.array_split(np.arange(len(x)), MOST_POINTS)
    chosen = [share[int(np.argmax(np.nan_to_num(y[share], nan=-np.inf)))] for share in shares]
    return x[chosen], y[chosen]


class _Axes:
    """Maps values to places in a picture."""

    def __init__(self, chart: Chart):
        x = np.concatenate([line.x[np.isfinite(line.y)] for line in chart.lines])
        y = np.concatenate([line.y[np.isfinite(line.y)] for line in chart.lines])
        y = np.append(y, chart.level) if math.isfinite(chart.level) else y
        self.x_low, self.x_high = float(x.min()), max(float(x.max()), float(x.min()) + 1)
        positive = y[y > 0]
        y = np.append(y, [0.0, 1.0]) if chart.is_share else y
        self.log = (
            not chart.is_share
            and len(positive) == len(y)
            and np.log10(positive.max() / positive.min()) > DECADES
        )
        low, high = float(y.min()), float(y.max())
        if self.log:
            low = max(low, high / 10**MOST_DECADES)
            low, high = math.log10(low), math.log10(high)
        pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        self.y_low, self.y_high = low - pad, high + pad

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.y_low
        share = (min(max(value, self.y_low), self.y_high) - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def y_ticks(self) -> list[float]:
        if not self.log:
            return _ticks(self.y_low, self.y_high, 5)
        whole = range(math.ceil(self.y_low), math.floor(self.y_high) + 1)
        stride = max(1, math.ceil(len(whole) / 5))
        if len(whole) >= 2:
            return [10.0**k for k in whole[::stride]]
        return [m * 10.0**k for k in range(math.floor(self.y_low), math.ceil(self.y_high)) for m in (1, 2, 5)
                if self.y_low <= math.log10(m * 10.0**k) <= self.y_high]  # fmt: skip


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two ends."""
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw)
    first = math.ceil(low / step)
    return [round(k * step, 12) for k in range(first, math.floor(high / step) + 1)]


def _figure(chart: Chart, findings: Sequence[RunFinding]) -> str:
    axes = _Axes(chart)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(chart.title)}">',
        *_grid(axes),
    ]
    parts += _marks(axes, findings)
    if math.isfinite(chart.level):
        y = axes.y(chart.level)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RED}" '
            f'stroke-dasharray="5 4"/><text x="{WIDTH - RIGHT}" y="{y - 4:.1f}" class="end" fill="{RED}">'
            f"{_text(chart.level_label)} {chart.level:g}</text>"
        )
    for line in chart.lines:
        parts += _line(axes, line)
    legend = "".join(
        f'<span style="--level:{line.color}">{_text(line.label)}</span>'
        for line in chart.lines
        if np.isfinite(line.y).any()
    )
    caption = f'<figcaption>{_text(chart.title)}<span class="legend">{legend}</span></figcaption>'
    return f"<figure>{caption}{''.join(parts)}</svg></figure>"


def _grid(axes: _Axes) -> list[str]:
    parts = []
    for value in axes.y_ticks():
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{_tick(value)}</text>')
    for value in _ticks(axes.x_low, axes.x_high, 6):
        x = axes.x(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" class="middle">{value:g}</text>')
    parts.append(f'<text x="{LEFT - 18}" y="{HEIGHT - 8}" class="end">step</text>')
    return parts


def _tick(value: float) -> str:
    """`0.01`, `100`, `1e6`."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:g}"


def _marks(axes: _Axes, findings: Sequence[RunFinding]) -> list[str]:
    """A vertical line with the number of each finding; numbers of one step stand side by side."""
    parts, beside = [], dict[int, int]()
    for number, one in enumerate(findings, start=1):
        if not axes.x_low <= one.step <= axes.x_high:
            continue
        x, color = axes.x(one.step), LEVELS[one.severity]
        shift = 14 * beside.get(one.step, 0)
        beside[one.step] = beside.get(one.step, 0) + 1
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{color}" '
            f'stroke-width="1" opacity=".6"/><text x="{x + 4 + shift:.1f}" y="{TOP + 10}" fill="{color}">'
            f"{number}</text>"
        )
    return parts


def _line(axes: _Axes, line: Line) -> list[str]:
    known = np.isfinite(line.y) & ((line.y > 0) | (not axes.log))
    parts = []
    points = [(axes.x(float(x)), axes.y(float(y))) for x, y in zip(line.x[known], line.y[known], strict=True)]
    if line.error is not None and np.isfinite(line.error[known]).any() and len(points) > 1:
        e = np.nan_to_num(line.error[known])
        upper = [
            f"{x:.1f},{axes.y(float(v + d)):.1f}"
            for (x, _), v, d in zip(points, line.y[known], e, strict=True)
        ]
        lower = [
            f"{x:.1f},{axes.y(float(v - d)):.1f}"
            for (x, _), v, d in zip(points, line.y[known], e, strict=True)
        ]
        parts.append(
            f'<polygon points="{" ".join([*upper, *lower[::-1]])}" fill="{line.color}" opacity=".18"/>'
        )
    width = 1 if line.thin else 1.8
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="{width}"/>')
    if line.dots and len(points) <= 120:
        hollow = np.zeros(len(points), bool) if line.hollow is None else line.hollow[known]
        for (x, y), empty in zip(points, hollow, strict=True):
            fill = "var(--paper)" if empty else line.color
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{fill}" stroke="{line.color}"/>')
    return parts


def _blocks(history: RunHistory) -> str:
    """The blocks with the largest share of the sharpest direction, at the last measurement that has it."""
    for column, words in (
        ("sharpness_share", "the sharpest direction that the optimizer sees"),
        ("lambda_max_share", "the sharpest direction"),
    ):
        for step in history.at[::-1]:
            shares = history.blocks_at(float(step), column)
            if shares:
                return _bars(shares, f"Blocks in {words}, step {step:.0f}")
    return ""


def _bars(shares: Mapping[str, float], title: str) -> str:
    top = sorted(shares.items(), key=lambda pair: -pair[1])[:MOST_BLOCKS]
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td><div class="bar" style="width:{100 * share:.1f}%"></div></td>'
        f'<td class="number">{100 * share:.0f} %</td></tr>'
        for name, share in top
    )
    return f"<figure><figcaption>{_text(title)}</figcaption><table>{rows}</table></figure>"


STYLE = """
:root { --ink:#1a202c; --soft:#5b6675; --paper:#ffffff; --card:#f6f8fa; --rule:#e2e8f0;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e6eaf0; --soft:#9aa6b5; --paper:#12161c; --card:#1b212a; --rule:#2c3440; }
}
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
main { max-width:1180px; margin:0 auto; padding:24px 20px 40px; }
h1 { font-size:24px; margin:0 0 2px; }
.facts, .foot, .reason, .step { color:var(--soft); }
.facts { margin:0 0 16px; } .foot { font-size:13px; margin-top:24px; }
.verdict { font-size:18px; font-weight:600; margin:0 0 12px; padding:8px 14px; background:var(--card);
  border-left:5px solid var(--level); border-radius:4px; }
.findings { list-style:none; margin:0 0 14px; padding:0; }
.findings li { background:var(--card); border-left:5px solid var(--level); border-radius:4px;
  margin:0 0 10px; padding:10px 14px; }
.findings p { margin:0 0 4px; max-width:96ch; } .reason { font-size:13px; }
.badge { display:inline-block; min-width:20px; text-align:center; border-radius:10px; margin-right:8px;
  background:var(--level); color:#fff; font-size:13px; line-height:20px; }
.level { color:var(--level); font-weight:600; }
.rate { margin:0 0 16px; }
.charts { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap:18px 22px; }
figure { margin:0; min-width:0; } svg { width:100%; height:auto; display:block; }
figcaption { font-weight:600; font-size:14px; display:flex; flex-wrap:wrap; gap:2px 14px; margin-bottom:4px; }
.legend { display:flex; flex-wrap:wrap; gap:2px 12px; font-weight:400; color:var(--soft); font-size:13px; }
.legend span::before { content:""; display:inline-block; width:14px; height:3px; margin-right:5px;
  vertical-align:middle; background:var(--level); }
svg text { font:12px system-ui, sans-serif; } svg text:not([fill]) { fill:var(--soft); }
.end { text-anchor:end; } .middle { text-anchor:middle; } .grid { stroke:var(--rule); }
table { width:100%; border-collapse:collapse; font-size:13px; } td { padding:3px 8px 3px 0; }
td:first-child { white-space:nowrap; width:1%; } td.number { width:48px; text-align:right; }
.bar { height:10px; border-radius:3px; background:#2b6cb0; min-width:2px; }
"""
