"""One version everywhere, and a wheel and a source distribution that hold the package and nothing else."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import curvescope

ROOT = Path(__file__).parents[1]
LIMIT = 10 * 2**20  # bytes of a distribution


def _first(pattern: str, file: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found, (pattern, file)
    return found.group(1)


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_the_same_everywhere():
    stated = {
        "pyproject.toml": _project()["version"],
        "CITATION.cff": _first(r"^version: (\S+)$", "CITATION.cff"),
        "CHANGELOG.md": _first(r"^## \[(\d[^\]]*)\]", "CHANGELOG.md"),
    }
    assert set(stated.values()) == {curvescope.__version__}, stated


def test_the_citation_and_the_changelog_give_one_date():
    version = re.escape(curvescope.__version__)
    assert _first(r'^date-released: "(.*)"$', "CITATION.cff") == _first(
        rf"^## \[{version}\] - (\S+)$", "CHANGELOG.md"
    )


def test_the_classifiers_begin_with_the_oldest_python_that_is_allowed():
    named = [line.rsplit(" ", 1)[1] for line in _project()["classifiers"] if "Python :: 3." in line]
    (low,) = re.findall(r"3\.(\d+)", _project()["requires-python"])
    assert named == [f"3.{int(low) + i}" for i in range(len(named))]


def test_the_oldest_versions_are_the_lower_bounds():
    """`make test-oldest` tests what pyproject.toml promises."""
    project = _project()
    asked = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    bounds = {
        found[1].lower(): found[2]
        for line in asked
        if (found := re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+).*", line))
    }
    lines = (ROOT / "requirements-oldest.lock").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    needed = {re.split(r"[\[>]", line)[0] for line in project["dependencies"]}
    assert needed <= set(pinned)
    for name in pinned.keys() & bounds.keys():
        assert _number(pinned[name]) == _number(bounds[name]), name


def _number(version: str) -> tuple[int, ...]:
    parts = [int(part) for part in version.split(".")]
    return tuple([*parts, 0, 0, 0][:3])


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (ROOT / "src/curvescope/py.typed").is_file()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building a distribution needs hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def _package() -> set[str]:
    """Files of the package as they lie in src, caches of Python left out."""
    files = (path for path in (ROOT / "src/curvescope").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"curvescope-{curvescope.__version__}.dist-info/"
        entry = archive.read(f"{about}entry_points.txt").decode()
    assert {name for name in names if not name.startswith(about)} == _package()
    assert f"{about}licenses/LICENSE" in names
    assert "curvescope = curvescope.cli:main" in entry
    assert wheel.stat().st_size < LIMIT


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_package(built):
    (sdist,) = built.glob("*.tar.gz")
    top = f"curvescope-{curvescope.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {item.name.removeprefix(top) for item in archive.getmembers() if item.isfile()}
    assert {name.removeprefix("src/") for name in names if name.startswith("src/")} == _package()
    rest = {name for name in names if not name.startswith("src/")}
    assert rest - {".gitignore"} == {
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
    }
    assert sdist.stat().st_size < LIMIT
