"""Requirements of the package, read from its metadata."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple


class Requirement(NamedTuple):
    """A package, the supported versions (`>=2.11`), and its extra, or "" if the package is required."""

    name: str
    versions: str
    extra: str


def requirements() -> list[Requirement]:
    """All requirements of curvescope, with those of its extras.

    Raises:
        PackageNotFoundError: The package is imported, but not installed.
    """
    result = []
    for line in requires("curvescope") or []:
        specifier, _, condition = line.partition(";")
        parts = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*(.*)", specifier.strip())
        assert parts is not None, line
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", condition)
        result.append(Requirement(parts[1], parts[2], "" if extra is None else extra[1]))
    return result


def how_to_install(package: str) -> str:
    """Command that installs an optional package, for every way of installing curvescope itself."""
    try:
        versions = next(
            (requirement.versions for requirement in requirements() if requirement.name == package), ""
        )
    except PackageNotFoundError:
        versions = ""
    return f"pip install '{package}{versions}'" if versions else f"pip install {package}"
