"""The published curves of |L_{k+1} − L_k| with their own kinds of networks (E4, E7, E8), beside controls.

A network is trained, its weights ŵ are fixed, and the mean loss L_k of the first k training pictures is
followed in random orders, smoothed as published. Beside every curve stands the same of independent numbers
with the losses' mean and variance. Nothing here knows a Hessian, neither here nor in the publications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvescope.algorithms.estimates.intervals import student
from curvescope.core.config import at_least, setting
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.tasks.pictures import PICTURES, Pictures, check_pictures, pictures
from curvescope.papers.common import OURS, FigureConfig, decided
from curvescope.papers.petrov2025.convergence_networks import Experiment, evaluate, experiments, fit
from curvescope.runs.shown import FAILS, HOLDS, Claim, Line, Origin, Shown
from curvescope.runs.study import Study
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.landscape.analysis import EMA, Growth, growth
from curvescope.studies.landscape.view import TAUTOLOGY, interval, overlap
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AUTO, FALLBACK = "auto", "digits"
POINTS = 300  # of a curve that is kept, evenly spread in log k
OTHERS = "not comparable: other network and pictures"
E4: Origin = ("petrov2025, figure", "paper")
E7: Origin = ("authors' code", "paper")
E8: Origin = ("arXiv 2409.11995, figure", "paper")
READING: Origin = ("ours, from the precursor's lemma ‖H‖ ∝ L(hM)^{2L}", "ours")
RESAMPLES, ENDS = 1000, (2.5, 97.5)
NEAR = 3.0  # a factor that a number which is read off a figure may be off
HEIGHTS = {"E7.rank8": (3333, 1e-5, E7), "E7.rank16": (3333, 4e-6, E7)}
"""k, and the published mean |L_{k+1} − L_k| there."""
CAPTIONS = {
    "convergence": "Mean |L_{{k+1}} − L_k| over {orders} random orders of the training pictures, smoothed "
    "as published (moving average, {smoothed}), for networks of the published kinds. Dotted: independent "
    "numbers with the same mean and variance (control); dashed: the limit, mean |l − mean|/k. Of E4 a "
    "number is the mean loss of a batch, k counts pictures. The table has root mean squares (model, "
    "control, and the law √(Var/(k(k+1)))) too.",
    "convergence_widths": "The limit of k|L_{{k+1}} − L_k|, which is the mean |l − mean| of the losses, of "
    "fully connected networks against their width; a line per number of matrices.",
    "convergence_networks": "Every network: pictures, parameters and those that were trained, validation "
    "accuracy, mean training loss, its mean absolute deviation, slopes of model and control with 95 % "
    "intervals, and k(k+1) E(L_{{k+1}} − L_k)² over the variance.",
}
TITLES = {
    "E4": "E4: a ViT, batch by batch",
    "E7": "E7: changes of low rank",
    "E8": "E8: fully connected",
}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: small networks on digits, half a minute; full: the published sizes on MNIST and CIFAR-100."""

    pictures: str = setting(
        AUTO,
        f"one of {', '.join(PICTURES)}, or a folder; auto: digits in quick, in full the published ones, or "
        "digits where these cannot be read",
    )
    num_orders: int = setting(100, "random orders of the pictures, as published")
    seed: int = setting(0, "of weights, of the order of training, and of the orders that are measured")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "num_orders")
        if self.pictures != AUTO:
            check_pictures(self.pictures)


@dataclass(frozen=True)
class Curve(Result):
    """One trained network: the losses of its training pictures, and how their mean settles."""

    family: str
    network: str
    pictures: str
    num_parameters: int
    num_trained: int  # of these, those that moved
    accuracy: float  # on the validation pictures
    group: int  # pictures of one number of the running mean
    width: int
    hidden: int
    losses: np.ndarray  # (n,) of single pictures
    growth: Growth  # at some k, which count groups
    note: str

    @property
    def deviation(self) -> float:
        """Mean |l − mean| over pictures: the limit of k |L_{k+1} − L_k|."""
        return float(np.abs(self.losses - self.losses.mean()).mean())


@dataclass(frozen=True)
class Convergence(Shown):
    """All curves by name."""

    curves: dict[str, Curve]

    def of(self, family: str) -> dict[str, Curve]:
        """The curves of one experiment."""
        return {name: curve for name, curve in self.curves.items() if curve.family == family}

    def summary(self) -> list[Line]:
        """Slopes of model and control, network by network."""
        lines = [
            (
                name,
                interval(c.growth.model.slope),
                f"slope; control {interval(c.growth.control.slope)}; {c.network}",
            )
            for name, c in self.curves.items()
        ]
        return [*lines, *(("note", "", note) for note in self.notes)]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        orders = next(iter(self.curves.values())).growth.num_orders
        return {name: text.format(orders=orders, smoothed=EMA) for name, text in CAPTIONS.items()}

    def claims(self) -> list[Claim]:
        """All claims."""
        first = self.curves["E4"]
        return [
            _slope(first),
            _plateau(first),
            *(_height(self.curves[name], *published) for name, published in HEIGHTS.items()),
            _rank(self),
            _grows(self, "width", "h"),
            _grows(self, "hidden", "L"),
            _law(self),
            _like_controls(self),
        ]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Curves at some k; one row per network."""
        import pandas as pd

        curves = []
        for name, c in self.curves.items():
            g = c.growth
            columns = {
                "k": g.k * c.group, "model": g.model.rms, "control": g.control.rms, "law": g.law,
                "model_mean": g.model.mean, "control_mean": g.control.mean,
                "model_smoothed": g.model.smoothed, "control_smoothed": g.control.smoothed,
            }  # fmt: skip
            curves.append(pd.DataFrame({"experiment": name, **columns}))
        return {
            "convergence": pd.concat(curves, ignore_index=True),
            "convergence_networks": pd.DataFrame([_row(name, c) for name, c in self.curves.items()]),
        }

    def figures(self) -> dict[str, Figure]:
        """Every figure by name."""
        return {"convergence": _curves(self), "convergence_widths": _widths(self)}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Convergence:
    """Train every network and follow its losses."""
    shelf = Shelf(cfg)
    chosen = experiments(cfg.profile)
    pieces = [
        Piece(name, partial(_measure, one, shelf, cfg), f"{one.family}: {one.words}", kind="networks")
        for name, one in chosen.items()
    ]
    found = work_through(pieces, progress=progress, state=state)
    curves = {name: found.take(Curve, name) for name in chosen}
    return Convergence(curves, notes=notes(curves))


class Shelf:
    """The pictures of a run, each read once."""

    def __init__(self, cfg: Config):
        self.cfg, self._read = cfg, {}

    def take(self, name: str, num: int | None) -> tuple[Pictures, str, str]:
        """The pictures for an experiment that was published with `name`, what they are, and a note."""
        if self.cfg.pictures != AUTO:
            return self._pictures(self.cfg.pictures, num), self.cfg.pictures, ""
        if self.cfg.profile == "quick":
            return self._pictures(FALLBACK, None), FALLBACK, ""
        try:
            return self._pictures(name, num), name, ""
        except CurvescopeError as error:
            return self._pictures(FALLBACK, None), FALLBACK, f"{FALLBACK} in place of {name}: {error}"

    def _pictures(self, name: str, num: int | None) -> Pictures:
        num = None if name == FALLBACK else num
        if (name, num) not in self._read:
            found = pictures(name, num=num, seed=self.cfg.seed)
            self._read[name, num] = found._replace(
                images=found.images.float(), validation_images=found.validation_images.float()
            )
        return self._read[name, num]


def _measure(one: Experiment, shelf: Shelf, cfg: Config) -> Curve:
    data, name, note = shelf.take(one.pictures, one.num_pictures)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)  # of layers that the hub's models draw themselves
        network, other = one.make(data, cfg.seed)
        network = network.to(cfg.device)
        fit(network, data.images, data.classes, one.how, seed=cfg.seed)
    losses, _ = evaluate(network, data.images, data.classes)
    _, accuracy = evaluate(network, data.validation_images, data.validation_classes)
    parameters = list(network.parameters())
    return Curve(
        family=one.family,
        network=one.words,
        pictures=name,
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        accuracy=accuracy,
        group=one.group,
        width=one.width,
        hidden=one.hidden,
        losses=losses,
        growth=thin(growth(grouped(losses, one.group, cfg.seed), num_orders=cfg.num_orders, seed=cfg.seed)),
        note="; ".join(part for part in (note, other) if part),
    )


def grouped(losses: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Mean losses of random groups of `size` pictures, what is left over left out."""
    if size == 1:
        return losses
    mixed = np.random.default_rng([seed, size]).permutation(losses)
    return mixed[: len(mixed) // size * size].reshape(-1, size).mean(1)


def thin(found: Growth) -> Growth:
    """The same with its curves at fewer k."""
    last = int(found.k[-1])
    chosen = np.unique(np.round(np.geomspace(1, last, POINTS)).astype(int)) - 1

    def cut(curve: Result) -> dict[str, np.ndarray]:
        values = {field.name: getattr(curve, field.name) for field in fields(curve)}
        return {name: value[chosen] for name, value in values.items() if np.shape(value) == (last,)}

    return replace(
        found,
        model=replace(found.model, **cut(found.model)),
        control=replace(found.control, **cut(found.control)),
        **cut(found),
    )


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


def _slope(curve: Curve) -> Claim:
    g = curve.growth
    near = abs(g.model.slope[0] - g.law_slope) < 0.1
    verdict = (TAUTOLOGY if overlap(g.model.slope, g.control.slope) else HOLDS) if near else FAILS
    shown = f"model {interval(g.model.slope)}, {g.control_name} numbers {interval(g.control.slope)}"
    return Claim("E4: |L_{k+1} − L_k| of a ViT falls as 1/k", "slope −1", shown, verdict, *E4)


def _plateau(curve: Curve) -> Claim:
    g = curve.growth
    flat = g.model.early[0] > g.model.slope[0] / 2
    verdict = (TAUTOLOGY if overlap(g.model.early, g.control.early) else HOLDS) if flat else FAILS
    shown = f"smoothed slope at first: model {interval(g.model.early)}, control {interval(g.control.early)}"
    return Claim("E4: it is flat at first, then steep", "flat below k ≈ 5,000", shown, verdict, *E4)


def _height(curve: Curve, k: int, published: float, origin: Origin) -> Claim:
    """Mean |L_{k+1} − L_k| at k, by its limit deviation/k."""
    value = curve.deviation / k
    same = curve.pictures == "mnist" and not curve.note
    near = 1 / NEAR < value / published < NEAR
    verdict = (HOLDS if near else FAILS) if same else OTHERS
    shown = f"{value:.2g} (deviation {curve.deviation:.3g}/k) with {curve.network} on {curve.pictures}"
    words = f"{curve.family}: mean |L_{{k+1}} − L_k| at k = {k:,}, {curve.network.rpartition(' with ')[2]}"
    return Claim(words, f"{published:g}", shown, verdict, *origin)


def _rank(found: Convergence) -> Claim:
    """Deviations on the same pictures, with an interval by resampling these."""
    low_rank, high_rank = (found.curves[name].losses for name in HEIGHTS)
    source, n = np.random.default_rng(0), len(low_rank)
    rows = [np.arange(n), *(source.integers(0, n, n) for _ in range(RESAMPLES))]
    ratios = [_deviation(high_rank[row]) / _deviation(low_rank[row]) for row in rows]
    low, high = np.percentile(ratios[1:], ENDS)
    verdict = decided(right=high < 1, wrong=low > 1)
    shown = f"rank 16 over rank 8: {ratios[0]:.2f} [{low:.2f}, {high:.2f}]"
    return Claim("E7: the curve of rank 16 ends below that of rank 8", "4e-06 and 1e-05", shown, verdict, *E7)


def _deviation(losses: np.ndarray) -> float:
    return float(np.abs(losses - losses.mean()).mean())


def _grows(found: Convergence, name: str, symbol: str) -> Claim:
    """The exponent of the deviation in width or depth, the other as a factor, over all networks."""
    curves = list(found.of("E8").values())
    extra = {"width": 0, "hidden": 2}
    x = np.log([getattr(c, name) + extra[name] for c in curves])
    others = [getattr(c, "hidden" if name == "width" else "width") for c in curves]
    columns = [x, *(np.array(others) == value for value in sorted(set(others)))]
    exponent, half = _least_squares(np.array(columns, dtype=float).T, np.log([c.deviation for c in curves]))
    verdict = decided(right=exponent - half > 0, wrong=exponent + half < 0)
    what = "width h" if name == "width" else "depth L"
    shown = f"k|L_{{k+1}} − L_k| ∝ {symbol}^{exponent:.2f} [{exponent - half:.2f}, {exponent + half:.2f}]"
    return Claim(f"E8: it grows with the {what}, as the bound does", "grows", shown, verdict, *READING)


def _least_squares(X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The first coefficient and half its 95 % interval, unknown without more rows than columns."""
    coefficients, *_ = np.linalg.lstsq(X, y, rcond=None)
    free = len(y) - X.shape[1]
    if free < 1:
        return float(coefficients[0]), float("nan")
    variance = float(((y - X @ coefficients) ** 2).sum()) / free * np.linalg.inv(X.T @ X)[0, 0]
    return float(coefficients[0]), student(free) * float(np.sqrt(variance))


def _law(found: Convergence) -> Claim:
    """k(k+1) E(L_{k+1} − L_k)² over the variance, in four standard errors of every curve."""
    ratios = np.array([c.growth.model.ratio for c in found.curves.values()])
    so = np.abs(ratios[:, 0] - 1) <= 4 / 1.96 * (ratios[:, 2] - ratios[:, 1]) / 2
    shown = f"ratio {ratios[:, 0].min():.3f} to {ratios[:, 0].max():.3f}; {so.sum()} of {len(so)} networks"
    claim = "E(L_{k+1} − L_k)² = Var/(k(k+1)) for all these networks"
    return Claim(claim, "ratio 1", shown, HOLDS if so.all() else FAILS, *OURS)


def _like_controls(found: Convergence) -> Claim:
    pairs = [(c.growth.model.slope, c.growth.control.slope) for c in found.curves.values()]
    so = [overlap(model, control) for model, control in pairs]
    models = [model[0] for model, _ in pairs]
    shown = f"{sum(so)} of {len(so)} networks; slopes {min(models):.3f} to {max(models):.3f}"
    verdict = HOLDS if all(so) else FAILS if not any(so) else "in part of the networks"
    return Claim("slopes are those of independent numbers", "intervals overlap", shown, verdict, *OURS)


def _curves(found: Convergence) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TITLES), figsize=(13, 4.2), layout="constrained")
    for ax, (family, title) in zip(axes, TITLES.items(), strict=True):
        curves = found.of(family)
        for i, (name, curve) in enumerate(curves.items()):
            color = plt.get_cmap("turbo")(0.05 + 0.9 * i / max(1, len(curves) - 1))
            _one(ax, curve, _label(name, curve), PALETTE[i] if len(curves) <= len(PALETTE) else color)
        ax.plot([], [], color="0.3", lw=1, ls=":", label="control")
        if family != "E8":
            ax.plot([], [], color="0.3", lw=0.7, ls="--", label="mean |l − mean| / k")
        ax.set(xscale="log", yscale="log", xlabel="pictures k")
        ax.set_title(title, fontsize=10)
        ax.legend(fontsize=7, loc="lower left")
    axes[0].set_ylabel("mean |L$_{k+1}$ − L$_k$|, smoothed")
    return figure


def _one(ax: Axes, curve: Curve, label: str, color: Any) -> None:
    g, k = curve.growth, curve.growth.k * curve.group
    ax.plot(k, g.model.smoothed, color=color, lw=1.5, label=label)
    ax.plot(k, g.control.smoothed, color=color, lw=1, ls=":")
    if curve.family != "E8":  # one line each: too many there
        ax.plot(k, g.deviation / g.k, color=color, lw=0.7, ls="--")


def _label(name: str, curve: Curve) -> str:
    if curve.family == "E8":
        return f"width {curve.width}, {curve.hidden + 2} matrices"
    return f"rank {name.rpartition('rank')[2]}" if curve.family == "E7" else curve.network


def _widths(found: Convergence) -> Figure:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.6, 4), layout="constrained")
    curves = list(found.of("E8").values())
    for i, hidden in enumerate(sorted({c.hidden for c in curves})):
        some = sorted((c.width, c.deviation) for c in curves if c.hidden == hidden)
        x, y = np.array(some).T
        ax.plot(x, y, "o-", color=PALETTE[i % len(PALETTE)], lw=1, ms=4, label=f"{hidden + 2} matrices")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("width h")
    ax.set_title("mean |l − mean|, the limit of k|L$_{k+1}$ − L$_k$|", fontsize=10)
    ax.legend()
    return figure


STUDY = Study(Config, run)
