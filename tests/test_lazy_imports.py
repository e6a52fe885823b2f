"""Imports inside functions have one of the reasons of docs/architecture.md; no two files need each other."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from import_contract import ROOT, SOURCE

DRAWING = {"matplotlib", "mpl_toolkits", "pandas"}  # loaded by every function that draws or makes a table
READERS = {
    "curvescope.runs.pieces",
    "curvescope.runs.resumable_loop",
    "curvescope.studies.run_study",
}  # loaded for pages and lists


def module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for path in SOURCE.rglob("*.py")}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement loads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    inside = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in FILES else str(node.module) for name in inside]


def imports(node: ast.AST, *, lazy: bool = False) -> Iterator[tuple[bool, list[str]]]:
    """Whether it stands in a function, and the modules, of every import that is carried out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # holds no statement
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield lazy, imported(child)
        yield from imports(child, lazy=lazy or isinstance(child, ast.FunctionDef))


@cache
def found() -> dict[str, list[tuple[bool, list[str]]]]:
    """The imports of every file."""
    return {name: list(imports(ast.parse(path.read_text(encoding="utf-8")))) for name, path in FILES.items()}


def reason(here: str, names: list[str]) -> str:
    """Why `here` imports these in a function."""
    if names[0].partition(".")[0] in DRAWING:
        return "drawing"
    if not names[0].startswith("curvescope."):
        return "packages"
    last = {name.rsplit(".")[-1] for name in names}
    if any(word.startswith("triton") for word in last):
        return "Triton"
    if here.startswith("curvescope.cli."):
        return "commands"
    if names[0].startswith("curvescope.distributed."):
        return "ranks"
    if names[0].startswith("curvescope.viz") or last <= {"figures", "tables", "view", "words"}:
        return "pictures"
    if here == "curvescope.nn.dropin":
        return "models"
    if here in READERS:
        return "torch"
    return f"{here} imports {names} in a function, for no reason that is known"


def test_imports_in_functions_are_counted():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+): .* \| (\d+|any number) \|$", page, flags=re.M)
    limits = {why: math.inf if most == "any number" else int(most) for why, most in rows}
    counts = Counter(reason(here, names) for here, each in found().items() for lazy, names in each if lazy)
    assert set(counts) == set(limits)
    assert {why: count for why, count in counts.items() if count > limits[why]} == {}


def test_no_two_files_need_each_other():
    eager = {
        here: {name for lazy, names in each if not lazy for name in names if name in FILES and name != here}
        for here, each in found().items()
    }
    assert len(list(TopologicalSorter(eager).static_order())) == len(FILES)  # raises where there is a circle
