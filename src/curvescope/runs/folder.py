"""Run folders: `runs/<study>/<stamp>-<hash>/` with everything that a run was and gave.

`config.toml`, `env.json`, `log.txt` and `state/` are there while it runs; `result.json`, `arrays.npz`,
`figures/` and `tables/` when it is done, and `state/` is gone. `result.json` comes last: a folder that has
one is finished. A folder is made when the first piece of work is done, so a call with a mistake in it
leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from curvescope import __version__
from curvescope.core.config import Config
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.runs.pieces import RESULT, Pieces

STATE, CONFIG = "state", "config.toml"


class RunFolder:
    """One run on disk; `pieces` is the state of its study."""

    def __init__(self, root: Path, study: str, cfg: Config):
        self.study, self.cfg = study, cfg
        text = tomli_w.dumps({"study": study, "version": __version__, **cfg.to_dict()})
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        unfinished = _unfinished(root / study, digest)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.resumed = unfinished is not None
        self.path = unfinished or root / study / f"{stamp}-{digest}"
        self._config_text = text
        self.pieces = Pieces(
            self.path / STATE, begin=self._begin, done=lambda name: self.log(f"done: {name}")
        )

    def log(self, line: str) -> None:
        """Add a line with the time to log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _begin(self) -> None:
        if not (self.path / CONFIG).exists():
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / CONFIG).write_text(self._config_text, encoding="utf-8")
            (self.path / "env.json").write_text(json.dumps(environment(), indent=1), encoding="utf-8")
        self.pieces.own()

    def finish(self, result: Any) -> None:
        """Write figures and tables, then the result, then forget the state."""
        self._begin()
        write_figures(result, self.path / "figures")
        write_tables(result, self.path / "tables")
        result.save(self.path)
        shutil.rmtree(self.path / STATE, ignore_errors=True)
        self.log("finished")


def environment() -> dict[str, str]:
    """Versions that a number may depend on."""
    import platform

    import numpy
    import torch

    return {
        "curvescope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def write_figures(result: Any, folder: Path) -> None:
    """Every figure as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "curvescope", "svg.fonttype": "path"}):
        for name, figure in result.figures().items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close(figure)


def write_tables(result: Any, folder: Path) -> None:
    """Every table as CSV, and the other texts of a result that has `files()`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in result.tables().items():
        table.to_csv(folder / f"{name}.csv", index=False)
    for name, text in getattr(result, "files", dict)().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _unfinished(root: Path, digest: str) -> Path | None:
    """The latest folder of this configuration that was begun, not finished, and that nobody works on."""
    found = [p for p in root.glob(f"*-{digest}") if (p / STATE).is_dir() and not (p / RESULT).exists()]
    return max((p for p in found if not Pieces(p / STATE).owned), default=None)
