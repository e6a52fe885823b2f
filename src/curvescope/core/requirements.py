"""Requirements of the package, read from its metadata."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple


class Requirement(NamedTuple):
    """A package, the versions that are taken, `>=2.11`, and its extra, "" where it is needed."""

    name: str
    versions: str
    extra: str


def requirements() -> list[Requirement]:
    """All of them, those of extras too.

    Raises:
        PackageNotFoundError: The package is imported, but not installed.
    """
    found = []
    for line in requires("curvescope") or []:
        asked, _, condition = line.partition(";")
        parts = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*(.*)", asked.strip())
        assert parts is not None, line
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", condition)
        found.append(Requirement(parts[1], parts[2], "" if extra is None else extra[1]))
    return found


def how_to_install(package: str) -> str:
    """The command that brings an optional package, however curvescope itself was installed."""
    try:
        versions = next((one.versions for one in requirements() if one.name == package), "")
    except PackageNotFoundError:
        versions = ""
    return f"pip install '{package}{versions}'" if versions else f"pip install {package}"
