"""Checkpoints of any run as a sequence: each measured as the monitor measures, without a training loop.

What is named is a folder of checkpoints (checkpoint-500, checkpoint-1000, … as Hugging Face's Trainer writes
them), folders one by one, or revisions of the model (initial, early, … of a bundled one; step1000, … of a hub
id). They are sorted by the last number in their names; those without one stay as they were given.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.core.numbers import plural
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.models.model import Model
from curvescope.models.zoo.names import BUNDLED, REVISIONS
from curvescope.monitor import CurvatureMonitor
from curvescope.monitor.result import Monitored
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.studies.checkpoints import check_alike
from curvescope.studies.dynamics.settings import Config
from curvescope.studies.dynamics.networks import AUTO, SAMPLE, SMALL
from curvescope.studies.setting import load_model, make_batches

CONFIGURATIONS = ("config.json", "config.toml", "adapter_config.json", "ckpt.pt")
NUMBER = re.compile(r"\d+")


class Point(NamedTuple):
    """A checkpoint: where it is loaded from, and the step in its name."""

    name: str
    model: str
    revision: str | None
    step: int | None


@dataclass(frozen=True)
class Sequence(Result):
    """What was seen at every checkpoint."""

    names: list[str]
    steps: np.ndarray  # (C,) numbers in the names, or their order
    numbered: bool
    seen: list[Monitored]  # one measurement each

    def column(self, name: str) -> np.ndarray:
        """(C,) a number of every checkpoint, see `monitor.columns`."""
        return np.array([float(one.history[name][0]) for one in self.seen])

    def block_map(self, name: str = "lambda_max") -> tuple[list[str], np.ndarray]:
        """Blocks in their order that have a number of this name somewhere, and (blocks, C) of it."""
        blocks = list(dict.fromkeys(str(b) for one in self.seen for b in one.blocks["block"]))
        found = np.full((len(blocks), len(self.seen)), np.nan)
        for j, one in enumerate(self.seen):
            for block, value in zip(one.blocks["block"], one.blocks[name], strict=True):
                found[blocks.index(str(block)), j] = value
        known = [i for i, row in enumerate(found) if np.isfinite(row).any()]
        return [blocks[i] for i in known], found[known]

    def followed(self) -> str:
        """`the 12 blocks that were followed (of 69)`: those with a λ_max of their own."""
        known = {str(b) for one in self.seen for b in one.blocks["block"]}
        count = len(self.block_map()[0])
        told = f"the {plural(count, 'block')} that {'was' if count == 1 else 'were'} followed"
        return "every block" if count == len(known) > 1 else f"{told} (of {len(known)})"


def find_points(cfg: Config) -> list[Point]:
    """The checkpoints that are meant, sorted."""
    points = [point for name in cfg.checkpoints for point in _points(cfg, name)]
    if all(point.step is not None for point in points):
        points.sort(key=lambda point: point.step or 0)
    doubled = {p.name for p in points if sum(q.name == p.name for q in points) > 1}
    return [p._replace(name=str(Path(p.model))) if p.name in doubled else p for p in points]


def _points(cfg: Config, name: str) -> list[Point]:
    folder = Path(name)
    if not _is_folder(folder):
        return [_revision(cfg, name)]
    if _is_model(folder):
        return [Point(folder.name, str(folder), None, _number(folder.name))]
    inside = sorted(child for child in folder.iterdir() if child.is_dir() and _is_model(child))
    if not inside:
        raise UsageError(
            f"checkpoints: expected a model in {folder}, or folders with models in it, found none",
            hint=f"a checkpoint has one of {', '.join(CONFIGURATIONS)}",
        )
    return [Point(child.name, str(child), None, _number(child.name)) for child in inside]


def _revision(cfg: Config, name: str) -> Point:
    """A revision of the model: of a bundled one its step is known."""
    if cfg.model == SMALL:
        if name not in REVISIONS:
            raise UsageError(
                f"checkpoints: expected a folder, or a revision of a model that is named, got {name!r}",
                hint="curvescope run dynamics HUB/ID --checkpoints step1000",
            )
        return _revision(replace(cfg, model="tiny-gpt"), name)
    if cfg.model not in BUNDLED:
        return Point(name, cfg.model, name, _number(name))
    about = files("curvescope") / "assets" / cfg.model / "training.json"
    steps = json.loads(about.read_text(encoding="utf-8"))["steps"]
    return Point(name, cfg.model, name, steps.get(name))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in CONFIGURATIONS)


def _number(name: str) -> int | None:
    found = NUMBER.findall(name)
    return int(found[-1]) if found else None


def load_point(cfg: Config, point: Point) -> Model:
    """The model of a checkpoint."""
    return load_model(replace(cfg, model=point.model, revision=point.revision))


def batches_of(cfg: Config, model: Model) -> Batches:
    """The data of all checkpoints, read by the first."""
    return make_batches(replace(cfg, data=SAMPLE if cfg.data == AUTO else cfg.data), model)


def contents_of(cfg: Config, points: list[Point], batches: Batches) -> str:
    """A digest of all checkpoints and the data; one model is in memory at a time."""
    first = load_point(cfg, points[0])
    digests = [fingerprint(first)]
    for point in points[1:]:
        model = load_point(cfg, point)
        check_alike(point.name, model, first)
        digests.append(fingerprint(model))
    return fingerprint(batches, *digests)


def measure_point(cfg: Config, point: Point, number: int, batches: Batches) -> Monitored:
    """One checkpoint, begun anew: numbers do not depend on which were measured before."""
    model = load_point(cfg, point)
    loss = "mse_mean" if batches[0].targets.is_floating_point() else "cross_entropy"
    problem = Problem(model, batches, loss if cfg.loss == AUTO else cfg.loss)
    monitor = CurvatureMonitor(
        model, problem.batches, problem.loss, budget=1.0, seed=cfg.seed, blocks=cfg.blocks,
        num_probes=cfg.num_probes, raise_errors=True,
    )  # fmt: skip
    monitor.measure(number if point.step is None else point.step)
    return monitor.result()
