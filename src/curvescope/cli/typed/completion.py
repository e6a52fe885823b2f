"""Names for the shell to complete; none of them imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from glob import glob

from curvescope.data.corpora import CORPORA
from curvescope.data.task_names import TASKS
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.papers import PAPERS
from curvescope.studies import STUDIES


def studies(incomplete: str = "") -> list[str]:
    """Studies that `run` takes."""
    return _begun(STUDIES, incomplete)


def papers(incomplete: str = "") -> list[str]:
    """Papers that `reproduce` takes."""
    return _begun(PAPERS, incomplete)


def models(incomplete: str = "") -> list[str]:
    """Bundled models, then files and folders."""
    return [*_begun(BUNDLED, incomplete), *_files(incomplete)]


def revisions(incomplete: str = "") -> list[str]:
    """Checkpoints of bundled models."""
    return _begun(REVISIONS, incomplete)


def sides(incomplete: str = "") -> list[str]:
    """What `compare` takes: bundled models, their checkpoints as NAME@REVISION, files and folders."""
    pairs = [f"{model}@{revision}" for model in BUNDLED for revision in REVISIONS]
    return [*_begun([*BUNDLED, *pairs], incomplete), *_files(incomplete)]


def sections(incomplete: str = "") -> list[str]:
    """Sections and studies of `report`; of a list the last one is completed."""
    from curvescope.report.wanted import names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _begun(names(), last)]


def data(incomplete: str = "") -> list[str]:
    """Corpora and tasks, then files and folders."""
    return [*_begun([*CORPORA, *(f"task:{name}" for name in TASKS)], incomplete), *_files(incomplete)]


def dtypes(incomplete: str = "") -> list[str]:
    """Precisions."""
    return _begun(("float32", "float64", "bfloat16", "float16"), incomplete)


def devices(incomplete: str = "") -> list[str]:
    """Kinds of devices."""
    return _begun(("auto", "cpu", "cuda", "mps"), incomplete)


def profiles(incomplete: str = "") -> list[str]:
    """How long something may take."""
    return _begun(("quick", "full"), incomplete)


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str) -> list[str]:
    return sorted(glob(f"{incomplete}*")) if incomplete else []
