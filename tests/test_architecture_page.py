"""docs/architecture.md: its drawing is the import contract, its files exist, its example runs."""

from __future__ import annotations

import re

from import_contract import ROOT, SOURCE, existing_packages, layers

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def drawing() -> list[list[str]]:
    """The rows of boxes between ┌ and └, each a list of packages as they are written."""
    (boxes,) = re.findall(r"^┌─+┐.*?└─+┘$", PAGE, flags=re.S | re.M)
    rows = [line[: line.rindex("│")] for line in boxes.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")[1:]] for row in rows]


def names(row: list[str]) -> list[str]:
    return [cell.strip("()") for cell in row]


def test_the_drawing_is_the_import_contract():
    assert [names(row) for row in drawing()] == layers()


def test_packages_in_parentheses_do_not_exist():
    cells = [cell for row in drawing() for cell in row]
    assert {cell.strip("()") for cell in cells if cell.startswith("(")} == set(
        names(cells)
    ) - existing_packages()


def test_the_table_has_a_line_for_every_package():
    listed = re.findall(r"^\| `(\w+)(/|\.py)` \|", PAGE, flags=re.M)
    order = [package for layer in layers() for package in layer if package in existing_packages()]
    assert [name for name, _ in listed] == order
    for name, ending in listed:
        assert (SOURCE / f"{name}{ending}").exists(), name


def test_lines_of_the_drawing_have_one_width():
    (boxes,) = re.findall(r"^┌─+┐.*?└─+┘$", PAGE, flags=re.S | re.M)
    lines = boxes.splitlines()
    assert {max(line.rfind(end) for end in "│┤┐┘") for line in lines} == {len(lines[0]) - 1}


def test_files_and_tests_that_are_named_exist():
    part = PAGE.split("## How one product is executed")[1]
    found = set(re.findall(r"`([\w/]+(?:\.py|/))`", part))
    assert len(found) > 20
    for name in found:
        homes = [ROOT / name, SOURCE / name, SOURCE / "engines" / name, SOURCE / "engines" / "replay" / name]
        assert any(home.exists() for home in homes), name
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE):
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_file_of_the_engine_is_explained():
    files = {p.name for p in (SOURCE / "engines").rglob("*.py")} - {"__init__.py"}
    assert {name for name in files if name not in PAGE} == set()


def test_names_that_are_said_are_there():
    part = PAGE.split("### Which context changes what")[1].split("###")[0]
    code = "".join(p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py"))
    for name in re.findall(r"^\| [\w-]+: ((?:`[\w.]+`(?:, )?)+) \|", part, flags=re.M):
        for each in re.findall(r"`(?:\w+\.)?(\w+)`", name):
            assert re.search(rf"\b(def|class) {each}\b|^    {each}:", code, flags=re.M), each


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    space: dict[str, object] = {}
    exec(compile(code, "docs/architecture.md", "exec"), space)
    assert len(space["estimate"].samples) == 2
