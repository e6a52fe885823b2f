"""docs/theory: verdicts are complete, the tests and the code it names exist, its links lead somewhere."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
THEORY = DOCS / "theory"
VERDICTS = ("holds", "holds with this reading", "false")
SOURCES = ("ormaniec2025", "singh2025", "petrov2025", "ours", "practice")
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


class Statement(NamedTuple):
    page: str  # the file it stands in
    number: int
    title: str
    text: str  # without the three lists
    verdict: str
    source: str
    code: list[str]
    tests: list[tuple[str, list[str]]]  # link, names of functions


def squeeze(text: str) -> str:
    return " ".join(text.split())


def read_tests(text: str) -> list[tuple[str, list[str]]]:
    """The links of a list, each with the names in backticks up to the next link."""
    found = list(LINK.finditer(text))
    ends = [link.start() for link in found[1:]] + [len(text)]
    return [
        (link[2], re.findall(r"`([^`]+)`", text[link.end() : end]))
        for link, end in zip(found, ends, strict=True)
    ]


def read_statement(page: str, number: str, title: str, body: str) -> Statement:
    text, *lists = re.split(r"(?m)^- (?=(?:Source|Code|Test): )", body)
    fields = dict(squeeze(item).split(": ", 1) for item in lists)
    verdicts = re.findall(r"(?m)^Verdict: \*\*(.*?)\*\*", text)
    assert len(verdicts) == 1, f"expected one verdict in statement {number}, got {verdicts}"
    assert set(fields) == {"Source", "Code", "Test"}, f"statement {number} has the lists {set(fields)}"
    code = re.findall(r"`([^`]+)`", fields["Code"])
    return Statement(
        page, int(number), title, text, verdicts[0], fields["Source"], code, read_tests(fields["Test"])
    )


def read_page(name: str) -> list[Statement]:
    parts = re.split(r"(?m)^## (\d+)\. (.+)$", PAGES[name])
    return [read_statement(name, *found) for found in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)]


PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(THEORY.glob("*.md"))}
INDEX = PAGES["index.md"]
STATEMENTS = sorted((s for name in PAGES for s in read_page(name)), key=lambda s: s.number)
each = pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: str(s.number))


def resolve(name: str) -> Any:
    """The object behind a dotted name below `curvescope`."""
    parts = ["curvescope", *name.split(".")]
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@cache
def functions(path: Path) -> set[str]:
    """Functions that a file defines, methods included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_at_least_thirty_statements_numbered_in_order():
    assert len(STATEMENTS) >= 30
    assert [s.number for s in STATEMENTS] == list(range(1, len(STATEMENTS) + 1))
    assert {s.verdict for s in STATEMENTS} == set(VERDICTS)
    for name, text in PAGES.items():
        for number in re.findall(r"statement (\d+)", squeeze(text)):
            assert 1 <= int(number) <= len(STATEMENTS), f"{name}: statement {number} does not exist"


@each
def test_a_verdict_is_one_of_three_and_comes_with_what_it_owes(statement: Statement):
    assert statement.verdict in VERDICTS
    assert ("*Reading.*" in statement.text) == (statement.verdict == "holds with this reading")
    for debt in ("*Counterexample.*", "*Correction.*"):
        assert (debt in statement.text) == (statement.verdict == "false"), debt
    assert any(source in statement.source for source in SOURCES)


@each
def test_the_named_tests_are_defined_in_the_linked_files(statement: Statement):
    assert statement.tests
    for link, names in statement.tests:
        path = (THEORY / link).resolve()
        assert path.is_relative_to(ROOT / "tests"), link
        assert path.is_file(), link
        assert names, f"{link} without the name of a test"
        for name in names:
            assert name.startswith("test_"), name
            assert name in functions(path), f"{name} is not in {link}"


@each
def test_the_implementing_names_can_be_imported(statement: Statement):
    assert statement.code
    for name in statement.code:
        assert resolve(name) is not None


def test_the_summary_has_every_statement_with_its_source_verdict_and_anchor():
    rows = re.findall(r"(?m)^\| (\d+) \| \[(.+?)\]\((.+?)#(.+?)\) \| (.+?) \| (.+?) \|$", INDEX)
    assert len(rows) == len(STATEMENTS)
    for (number, title, page, anchor, source, verdict), statement in zip(rows, STATEMENTS, strict=True):
        assert (int(number), title, source) == (statement.number, statement.title, statement.source)
        assert page == statement.page
        assert verdict.strip("*") == statement.verdict
        heading = f"{number}. {title}"
        assert heading.isascii(), "GitHub and MkDocs make different anchors of other letters"
        assert anchor == re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).lower())


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_links_of_the_documentation_lead_somewhere(page: Path):
    """MkDocs leaves links out of docs/, as those to tests, unchecked."""
    for _, target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_the_pages_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in PAGES:
        assert f"theory/{name}\n" in navigation, name
