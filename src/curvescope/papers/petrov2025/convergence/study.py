"""The published curves of |L_{k+1} − L_k| with their own kinds of networks (E4, E7, E8), beside controls.

A network is trained, its weights ŵ are fixed, and the mean loss L_k of the first k training pictures is
followed in random orders, smoothed as published. Beside every curve stands the same of independent numbers
with the losses' mean and variance. Nothing here knows a Hessian, neither here nor in the publications.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from curvescope.core.config import at_least, setting
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.tasks.pictures import PICTURES, Pictures, check_pictures, pictures
from curvescope.papers.common import FigureConfig
from curvescope.papers.petrov2025.convergence import claims, words
from curvescope.papers.petrov2025.convergence.experiments import Experiment, experiments
from curvescope.papers.petrov2025.convergence.training import evaluate, fit
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.landscape.growth import Growth, growth

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

AUTO, FALLBACK = "auto", "digits"
POINTS = 300  # of a curve that is kept, evenly spread in log k


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
        """The numbers to look at first."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def claims(self) -> list[Claim]:
        """What the publications say, next to what was measured."""
        return claims.of(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per curve and k, and one per curve."""
        return words.tables(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.papers.petrov2025.convergence import figures

        return figures.draw(self)


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
    return Convergence(curves, notes=words.notes(curves))


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
