"""The published curves of |L_{k+1} − L_k| with networks of the same kinds (E4, E7, E8), with controls.

A network is trained and its weights ŵ are fixed. The mean loss L_k of the first k training images is computed
for random orders and smoothed as published. Each curve has a control: the same for independent numbers with
the losses' mean and variance. No Hessian is involved, neither here nor in the publications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvescope.algorithms.estimates.intervals import student
from curvescope.core.config import setting
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.tasks.pictures import PICTURES, Pictures, check_pictures, pictures
from curvescope.papers.common import OURS, FigureConfig, decided
from curvescope.papers.petrov2025.convergence_networks import NetworkExperiment, evaluate, experiments, fit
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import FAILS, HOLDS, Claim, Line, Origin, Shown, Tables
from curvescope.studies.landscape.analysis import EMA, IncrementGrowth, growth
from curvescope.studies.landscape.view import interval, overlap, plateau_verdict, slope_verdict
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AUTO, FALLBACK = "auto", "digits"
POINTS = 300  # points of a stored curve, evenly spaced in log k
OTHERS = "not comparable: different network and images"
E4: Origin = ("petrov2025, figure", "paper")
E7: Origin = ("authors' code", "paper")
E8: Origin = ("arXiv 2409.11995, figure", "paper")
READING: Origin = ("ours, from the precursor's lemma ‖H‖ ∝ L(hM)^{2L}", "ours")
RESAMPLES, ENDS = 1000, (2.5, 97.5)
NEAR = 3.0  # tolerated factor for a number that is read off a figure
HEIGHTS = {"E7.rank8": (3333, 1e-5, E7), "E7.rank16": (3333, 4e-6, E7)}
"""k, and the published mean |L_{k+1} − L_k| at this k."""
CAPTIONS = {
    "convergence": "Mean |L_{{k+1}} − L_k| over {orders} random orders of the training images, smoothed as "
    "published (moving average, {smoothed}), for networks of the published kinds. Dotted: independent "
    "numbers with the same mean and variance (control). Dashed: the limit, mean |l − mean|/k. For E4, "
    "one number is the mean loss of a batch; k counts images. The table also has root mean squares "
    "(model, control, and the law √(Var/(k(k+1)))).",
    "convergence_widths": "Limit of k|L_{{k+1}} − L_k|, the mean |l − mean| of the losses, for fully "
    "connected networks against their width; one line per number of matrices.",
    "convergence_networks": "Every network: images, parameters and trained parameters, validation accuracy, "
    "mean training loss, its mean absolute deviation, slopes of model and control with 95 % intervals, "
    "and k(k+1) E(L_{{k+1}} − L_k)² over the variance.",
}
TITLES = {
    "E4": "E4: a ViT, batch by batch",
    "E7": "E7: low-rank changes",
    "E8": "E8: fully connected",
}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: small networks on digits, half a minute; full: the published sizes on MNIST and CIFAR-100."""

    pictures: str = setting(
        AUTO,
        f"images: one of {', '.join(PICTURES)}, or images:FOLDER; auto: digits in quick; in full the "
        "published images, or digits if these cannot be read",
    )
    num_orders: int = setting(100, "random orders of the images, as published", least=2)
    seed: int = setting(0, "seed of weights, of the training order, and of the measured orders")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pictures != AUTO:
            check_pictures(self.pictures)


@dataclass(frozen=True)
class NetworkCurve(Result):
    """One trained network: losses of its training images, and increments of their mean."""

    family: str
    network: str
    pictures: str
    num_parameters: int
    num_trained: int  # parameters that were trained
    accuracy: float  # on the validation images
    group: int  # images whose mean loss is one number of the running mean
    width: int
    hidden: int
    losses: np.ndarray  # (n,) of single images
    growth: IncrementGrowth  # at some k; k counts groups
    note: str

    @property
    def deviation(self) -> float:
        """Mean |l − mean| over images: the limit of k |L_{k+1} − L_k|."""
        return float(np.abs(self.losses - self.losses.mean()).mean())


@dataclass(frozen=True)
class Convergence(Shown):
    """All curves by name."""

    curves: dict[str, NetworkCurve]

    def of(self, family: str) -> dict[str, NetworkCurve]:
        """Return the curves of one experiment."""
        return {name: curve for name, curve in self.curves.items() if curve.family == family}

    def summary(self) -> list[Line]:
        """Slopes of model and control for every network."""
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
        """Return the caption of each figure and table."""
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

    def tables(self) -> Tables:
        """Curves at some k, and one row per network."""
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
            "convergence": curves,
            "convergence_networks": [_row(name, c) for name, c in self.curves.items()],
        }

    def figures(self) -> dict[str, Figure]:
        """Return every figure by name."""
        return {"convergence": _curves(self), "convergence_widths": _widths(self)}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Convergence:
    """Train every network and compute the increments of its mean loss."""
    shelf = Shelf(cfg)
    chosen = experiments(cfg.profile)
    pieces = [
        Piece(name, partial(_measure, one, shelf, cfg), f"{one.family}: {one.words}", kind="networks")
        for name, one in chosen.items()
    ]
    found = work_through(pieces, progress=progress, state=state)
    curves = {name: found.take(NetworkCurve, name) for name in chosen}
    return Convergence(curves, notes=notes(curves))


class Shelf:
    """Cache of the image data of a run, so that each set is read once."""

    def __init__(self, cfg: Config):
        self.cfg, self._read = cfg, {}

    def take(self, name: str, num: int | None) -> tuple[Pictures, str, str]:
        """Return the images for an experiment that was published with `name`, their name, and a note."""
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


def _measure(experiment: NetworkExperiment, shelf: Shelf, cfg: Config) -> NetworkCurve:
    data, name, note = shelf.take(experiment.pictures, experiment.num_pictures)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)  # seed for layers that models of the hub initialize themselves
        network, other = experiment.make(data, cfg.seed)
        network = network.to(cfg.device)
        fit(network, data.images, data.classes, experiment.how, seed=cfg.seed)
    losses, _ = evaluate(network, data.images, data.classes)
    _, accuracy = evaluate(network, data.validation_images, data.validation_classes)
    parameters = list(network.parameters())
    return NetworkCurve(
        family=experiment.family,
        network=experiment.words,
        pictures=name,
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        accuracy=accuracy,
        group=experiment.group,
        width=experiment.width,
        hidden=experiment.hidden,
        losses=losses,
        growth=thin(
            growth(grouped(losses, experiment.group, cfg.seed), num_orders=cfg.num_orders, seed=cfg.seed)
        ),
        note="; ".join(part for part in (note, other) if part),
    )


def grouped(losses: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Mean losses of random groups of `size` images; a remainder is dropped."""
    if size == 1:
        return losses
    mixed = np.random.default_rng([seed, size]).permutation(losses)
    return mixed[: len(mixed) // size * size].reshape(-1, size).mean(1)


def thin(growth: IncrementGrowth) -> IncrementGrowth:
    """Thin the curves to fewer k."""
    last = int(growth.k[-1])
    chosen = np.unique(np.round(np.geomspace(1, last, POINTS)).astype(int)) - 1

    def cut(curve: Result) -> dict[str, np.ndarray]:
        values = {field.name: getattr(curve, field.name) for field in fields(curve)}
        return {name: value[chosen] for name, value in values.items() if np.shape(value) == (last,)}

    return replace(
        growth,
        model=replace(growth.model, **cut(growth.model)),
        control=replace(growth.control, **cut(growth.control)),
        **cut(growth),
    )


def notes(curves: Mapping[str, NetworkCurve]) -> list[str]:
    """Return notes on differences from the publications."""
    own = dict.fromkeys(f"{c.family}: {c.note}" for c in curves.values() if c.note)
    used = ", ".join(dict.fromkeys(c.pictures for c in curves.values()))
    return [
        f"images: {used}; published: cifar100 (E4), mnist (E7, and E8 among others)",
        "we chose the learning rates of E4, the head of E7 (trained here) and the biases of E8; E7 has "
        "no dropout here; E8 on features of a ViT is not included",
        *own,
    ]


def _row(name: str, c: NetworkCurve) -> dict[str, object]:
    row: dict[str, object] = {
        "experiment": name, "network": c.network, "pictures": c.pictures, "parameters": c.num_parameters,
        "trained": c.num_trained, "accuracy": c.accuracy, "loss": float(c.losses.mean()),
        "deviation": c.deviation, "group": c.group,
    }  # fmt: skip
    for kind, curve in (("model", c.growth.model), ("control", c.growth.control)):
        value, low, high = curve.slope
        row |= {f"slope_{kind}": value, f"slope_{kind}_low": low, f"slope_{kind}_high": high}
    return {**row, "ratio": float(c.growth.model.ratio[0])}


def _slope(curve: NetworkCurve) -> Claim:
    g = curve.growth
    shown = f"model {interval(g.model.slope)}, {g.control_name} numbers {interval(g.control.slope)}"
    return Claim("E4: |L_{k+1} − L_k| of a ViT falls as 1/k", "slope −1", shown, slope_verdict(g), *E4)


def _plateau(curve: NetworkCurve) -> Claim:
    g = curve.growth
    shown = f"smoothed slope at first: model {interval(g.model.early)}, control {interval(g.control.early)}"
    claim = "E4: the increments first stay flat, then fall steeply"
    return Claim(claim, "flat below k ≈ 5,000", shown, plateau_verdict(g), *E4)


def _height(curve: NetworkCurve, k: int, published: float, origin: Origin) -> Claim:
    """Compare mean |L_{k+1} − L_k| at k with the published value, by its limit deviation/k."""
    value = curve.deviation / k
    same = curve.pictures == "mnist" and not curve.note
    near = 1 / NEAR < value / published < NEAR
    verdict = (HOLDS if near else FAILS) if same else OTHERS
    shown = f"{value:.2g} (deviation {curve.deviation:.3g}/k) with {curve.network} on {curve.pictures}"
    words = f"{curve.family}: mean |L_{{k+1}} − L_k| at k = {k:,}, {curve.network.rpartition(' with ')[2]}"
    return Claim(words, f"{published:g}", shown, verdict, *origin)


def _rank(result: Convergence) -> Claim:
    """Compare deviations on the same images, with an interval from resampled images."""
    low_rank, high_rank = (result.curves[name].losses for name in HEIGHTS)
    source, n = np.random.default_rng(0), len(low_rank)
    rows = [np.arange(n), *(source.integers(0, n, n) for _ in range(RESAMPLES))]
    ratios = [_deviation(high_rank[row]) / _deviation(low_rank[row]) for row in rows]
    low, high = np.percentile(ratios[1:], ENDS)
    verdict = decided(right=high < 1, wrong=low > 1)
    shown = f"rank 16 over rank 8: {ratios[0]:.2f} [{low:.2f}, {high:.2f}]"
    return Claim("E7: the curve of rank 16 ends below that of rank 8", "4e-06 and 1e-05", shown, verdict, *E7)


def _deviation(losses: np.ndarray) -> float:
    return float(np.abs(losses - losses.mean()).mean())


def _grows(result: Convergence, name: str, symbol: str) -> Claim:
    """Exponent of the deviation in width or depth, with the other as a factor, over all networks."""
    curves = list(result.of("E8").values())
    extra = {"width": 0, "hidden": 2}
    x = np.log([getattr(c, name) + extra[name] for c in curves])
    others = [getattr(c, "hidden" if name == "width" else "width") for c in curves]
    columns = [x, *(np.array(others) == value for value in sorted(set(others)))]
    exponent, half = _least_squares(np.array(columns, dtype=float).T, np.log([c.deviation for c in curves]))
    verdict = decided(right=exponent - half > 0, wrong=exponent + half < 0)
    what = "width h" if name == "width" else "depth L"
    shown = f"k|L_{{k+1}} − L_k| ∝ {symbol}^{exponent:.2f} [{exponent - half:.2f}, {exponent + half:.2f}]"
    return Claim(
        f"E8: the increments grow with the {what}, as the bound does", "grows", shown, verdict, *READING
    )


def _least_squares(X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the first coefficient and half its 95 % interval; nan without more rows than columns."""
    coefficients, *_ = np.linalg.lstsq(X, y, rcond=None)
    free = len(y) - X.shape[1]
    if free < 1:
        return float(coefficients[0]), float("nan")
    variance = float(((y - X @ coefficients) ** 2).sum()) / free * np.linalg.inv(X.T @ X)[0, 0]
    return float(coefficients[0]), student(free) * float(np.sqrt(variance))


def _law(result: Convergence) -> Claim:
    """Check k(k+1) E(L_{k+1} − L_k)² over the variance: within four standard errors for every curve."""
    ratios = np.array([c.growth.model.ratio for c in result.curves.values()])
    so = np.abs(ratios[:, 0] - 1) <= 4 / 1.96 * (ratios[:, 2] - ratios[:, 1]) / 2
    shown = f"ratio {ratios[:, 0].min():.3f} to {ratios[:, 0].max():.3f}; {so.sum()} of {len(so)} networks"
    claim = "E(L_{k+1} − L_k)² = Var/(k(k+1)) for all these networks"
    return Claim(claim, "ratio 1", shown, HOLDS if so.all() else FAILS, *OURS)


def _like_controls(result: Convergence) -> Claim:
    pairs = [(c.growth.model.slope, c.growth.control.slope) for c in result.curves.values()]
    so = [overlap(model, control) for model, control in pairs]
    models = [model[0] for model, _ in pairs]
    shown = f"{sum(so)} of {len(so)} networks; slopes {min(models):.3f} to {max(models):.3f}"
    verdict = HOLDS if all(so) else FAILS if not any(so) else "for some of the networks"
    return Claim("slopes equal those of independent numbers", "intervals overlap", shown, verdict, *OURS)


def _curves(result: Convergence) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = style.subplots(1, len(TITLES), figsize=(13, 4.2))
    for ax, (family, title) in zip(axes, TITLES.items(), strict=True):
        curves = result.of(family)
        for i, (name, curve) in enumerate(curves.items()):
            color = plt.get_cmap("turbo")(0.05 + 0.9 * i / max(1, len(curves) - 1))
            _one(ax, curve, _label(name, curve), PALETTE[i] if len(curves) <= len(PALETTE) else color)
        ax.plot([], [], color="0.3", lw=1, ls=":", label="control")
        if family != "E8":
            ax.plot([], [], color="0.3", lw=0.7, ls="--", label="mean |l − mean| / k")
        ax.set(xscale="log", yscale="log", xlabel="images k", title=title)
        ax.legend(loc="lower left")
    axes[0].set_ylabel("mean |L$_{k+1}$ − L$_k$|, smoothed")
    return figure


def _one(ax: Axes, curve: NetworkCurve, label: str, color: Any) -> None:
    g, k = curve.growth, curve.growth.k * curve.group
    ax.plot(k, g.model.smoothed, color=color, lw=1.5, label=label)
    ax.plot(k, g.control.smoothed, color=color, lw=1, ls=":")
    if curve.family != "E8":  # only one line per curve, because there are many
        ax.plot(k, g.deviation / g.k, color=color, lw=0.7, ls="--")


def _label(name: str, curve: NetworkCurve) -> str:
    if curve.family == "E8":
        return f"width {curve.width}, {curve.hidden + 2} matrices"
    return f"rank {name.rpartition('rank')[2]}" if curve.family == "E7" else curve.network


def _widths(result: Convergence) -> Figure:
    figure, ax = style.subplots(figsize=(5.6, 4))
    curves = list(result.of("E8").values())
    for i, hidden in enumerate(sorted({c.hidden for c in curves})):
        some = sorted((c.width, c.deviation) for c in curves if c.hidden == hidden)
        x, y = np.array(some).T
        ax.plot(x, y, "o-", color=PALETTE[i % len(PALETTE)], lw=1, ms=4, label=f"{hidden + 2} matrices")
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="width h", title="mean |l − mean|, the limit of k|L$_{k+1}$ − L$_k$|")
    ax.legend()
    return figure


STUDY = Study(Config, run)
