"""The folder of a reproduction, which holds the tables, figures and arrays of every figure of a paper.

    heatmap.csv  heatmap.pdf  heatmap.png  heatmap.html  heatmap.json  heatmap.npz  …
    settings.json  all_claims.csv  all_claims.md

`settings.json` lists the complete figures with their settings and files. Unfinished files lie under
`state/`, piece by piece, and move out when the figure is complete. So a run that was
killed can resume, and an incomplete figure never looks finished.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvescope import __version__
from curvescope.core.config import Config
from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError
from curvescope.core.result import UnreadableResult, strict_json
from curvescope.papers import PAPERS
from curvescope.runs.disk.atomic_files import (
    check_distinct,
    check_writable,
    sync,
    sync_tree,
    write_atomically,
)
from curvescope.runs.folder import STATE, AlreadyFinished, Say, environment, run_digest
from curvescope.runs.pieces import RESULT, Pieces
from curvescope.runs.resumable_loop import PieceStore
from curvescope.runs.study_result import Shown
from curvescope.runs.verification.checks import Verification, verification_key

SETTINGS, ARRAYS = "settings.json", "arrays.npz"
ALL_CLAIMS = "all_claims"  # name of the table of all claims
DPI = {"pdf": 200, "png": 150}  # resolution of figures; of images inside a PDF


class FigureFolder(PieceStore):
    """One figure of a paper in the folder `out`; its pieces lie under state/<figure>-<hash>.

    The hash is computed from version, settings, and contents of model and data.

    Args:
        force: compute finished figures again.
    """

    def __init__(
        self,
        out: Path,
        paper: str,
        figure: str,
        cfg: Config,
        *,
        say: Say = lambda line: None,
        force: bool = False,
    ):
        self.out, self.paper, self.figure, self.cfg, self._say = out, paper, figure, cfg, say
        self._force = force
        self._settings = json.dumps({"version": __version__, **cfg.to_dict()}, sort_keys=True)
        self._contents = ""
        self._pieces: Pieces | None = None
        self._verified: dict[tuple[str, str, str], dict[str, Any]] = {}

    def at(self, contents: str, names: Sequence[str] = ()) -> Pieces:
        """Open the pieces of this figure for its settings and these contents.

        Raises:
            AlreadyFinished: if the figure is finished and `force` is not set.
        """
        if not self._force and self._finished(contents):
            raise AlreadyFinished(self.out)
        return self._opened(contents, names)

    def _finished(self, contents: str) -> bool:
        """Return True if all files of the figure exist, with the same version, settings and contents."""
        if not (self.out / SETTINGS).exists():
            return False
        found = read_settings(self.out)["figures"].get(self.figure)
        if found is None or found.get("contents") != contents:
            return False
        of = json.dumps({"version": found["version"], **found["settings"]}, sort_keys=True)
        if of != self._settings or not all((self.out / name).exists() for name in found["files"]):
            return False
        try:
            load_result(self.out, self.figure)
        except UnreadableResult:
            self.tell("the stored result is damaged and is computed again")
            return False
        return True

    def _opened(self, contents: str, names: Sequence[str] = ()) -> Pieces:
        self._contents = contents
        place = self.out / STATE / f"{self.figure}-{run_digest(self._settings, contents)}"
        run = run_digest(self._settings, contents, digits=32)
        pieces = self._pieces = Pieces(place, tell=self.tell, run=run)
        if pieces.owned:
            raise CurvescopeError(
                f"another process computes {self.figure} in {self.out}",
                hint="wait until it ends, or choose another --out",
            )
        if len(pieces):
            self._say(f"{self.figure}: resuming, {len(pieces)} of {len(names)} pieces were there")
        elif any(place.parent.glob(f"{self.figure}-*")):
            self._say(
                f"{self.figure}: starting again, because the unfinished run has other settings, model or data"
            )
        return pieces

    def tell(self, line: str) -> None:
        """Report a line with the name of the figure."""
        self._say(f"{self.figure}: {line}")

    def warn(self, line: str) -> None:
        """Report a warning like any line, because a reproduction has no log."""
        self.tell(line)

    def verified(self, found: Verification) -> None:
        """Store a verification for `settings.json`."""
        self._verified[verification_key(found.plain())] = found.plain()

    def finish(self, result: Shown, *, seconds: float, say: Say) -> list[str]:
        """Write all files, record them in the settings, and delete the state; return the file names."""
        entry = {
            "settings": self.cfg.to_dict(),
            "version": __version__,
            "contents": self._contents,
            "environment": environment(),
            "seconds": round(seconds, 1),
            "verification": list(self._verified.values()),
        }
        pieces = self._opened("") if self._pieces is None else self._pieces
        pieces.begin()
        staging = pieces.folder / "finished"
        files = publish(self.out, self.paper, self.figure, result, entry, staging, say)
        shutil.rmtree(pieces.folder, ignore_errors=True)
        _remove_if_empty(self.out / STATE)
        return files


def publish(
    out: Path, paper: str, figure: str, result: Shown, entry: dict[str, Any], staging: Path, say: Say
) -> list[str]:
    """Write a result's files into `staging`, move them to `out`, and record them there."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(result, staging, figure, title=f"{paper}: {figure}", say=say)
    new = {"paper": paper, "citation": PAPERS[paper].citation, "figures": {}}
    meta = read_settings(out) if (out / SETTINGS).exists() else new
    sync_tree(staging)
    files = sorted(path.name for path in staging.iterdir())
    others = [name for other, found in meta["figures"].items() if other != figure for name in found["files"]]
    check_distinct([*files, *others, f"{ALL_CLAIMS}.csv", f"{ALL_CLAIMS}.md"])
    old = meta["figures"].pop(figure, {}).get("files", [])
    _write_settings(out, meta)  # the figure counts as unfinished from here until the end
    for name in set(old) - set(files):
        (out / name).unlink(missing_ok=True)
    for name in files:
        (staging / name).replace(out / name)
    sync(out)
    meta["figures"][figure] = {**entry, "files": files}
    _write_settings(out, meta)
    shutil.rmtree(staging, ignore_errors=True)
    return files


def write(result: Shown, folder: Path, stem: str, *, title: str, say: Say) -> None:
    """Write tables as CSV, figures as PDF and PNG, an interactive page, and the result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from curvescope.viz import interactive

    for name, table in result.tables().items():
        table.to_csv(folder / f"{name}.csv", index=False)
    figures = result.figures()
    check_distinct(figures)
    check_distinct(result.tables())
    with plt.rc_context({"pdf.fonttype": 42}):
        for name, figure in figures.items():
            for kind, dpi in DPI.items():
                options: dict[str, Any] = {"metadata": {"CreationDate": None}} if kind == "pdf" else {}
                figure.savefig(folder / f"{name}.{kind}", dpi=dpi, **options)
    scenes = {name: interactive.scene(figure) for name, figure in figures.items()}
    scenes |= result.scenes()
    for figure in figures.values():
        plt.close(figure)
    try:
        text = interactive.page(title, scenes, result.captions())
        (folder / f"{stem}.html").write_text(text, encoding="utf-8")
    except MissingExtra as error:
        say(f"{stem}: no interactive page: {error}")
    saved = result.save(folder / "saved")
    (saved / ARRAYS).rename(folder / f"{stem}.npz")
    (saved / RESULT).rename(folder / f"{stem}.json")
    saved.rmdir()


def load_result(out: Path, figure: str) -> Shown:
    """Load the stored result of a finished figure."""
    if figure not in read_settings(out)["figures"]:
        raise CurvescopeError(
            f"expected stored results of {figure} in {out}, found none", hint="run it without --draw first"
        )
    with tempfile.TemporaryDirectory() as place:
        for name, kind in ((RESULT, "json"), (ARRAYS, "npz")):
            source = out / f"{figure}.{kind}"
            if not source.exists():
                raise CurvescopeError(f"{source} is missing", hint="run the figure again without --draw")
            shutil.copyfile(source, Path(place) / name)
        return Shown.load(place)


def check_folder(out: Path, paper: str) -> None:
    """Raise an error if the figures of `paper` cannot be written into `out`, which need not exist."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"expected a folder, got the file {out}")
    if (out / SETTINGS).exists() and (other := read_settings(out)["paper"]) != paper:
        raise UsageError(f"{out} contains the figures of {other}", hint="choose another --out")
    check_writable(out)


def read_settings(out: Path) -> dict[str, Any]:
    """Read `settings.json`: paper, citation and the finished figures."""
    try:
        settings = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
        assert settings["paper"] in PAPERS
        assert isinstance(settings["figures"], dict)
    except FileNotFoundError:
        unfinished = (
            " (nothing in it is finished: run the same command again to resume)"
            if (out / STATE).exists()
            else ""
        )
        raise CurvescopeError(f"expected a reproduction with {SETTINGS}, got {out}{unfinished}") from None
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise CurvescopeError(f"could not read {out / SETTINGS}: {error}") from error
    return settings


def _write_settings(out: Path, meta: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / SETTINGS, json.dumps(strict_json(meta), indent=1, ensure_ascii=False))


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
