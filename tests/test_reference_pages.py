"""docs/reference: what the pages ask for exists, and every public name is on one of them."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import curvescope as cs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ASKED = {
    name: page.name
    for page in sorted((DOCS / "reference").glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.M)
}


def found(name: str) -> Any:
    """A module, or what a module holds."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        home, _, last = name.rpartition(".")
        return getattr(import_module(home), last)


@pytest.mark.parametrize("name", ASKED)
def test_what_a_page_shows_is_there_and_has_words(name):
    assert found(name).__doc__


@pytest.mark.parametrize("name", [name for name in cs.__all__ if name != "__version__"])
def test_public_names_are_shown(name):
    thing = getattr(cs, name)
    homes = {thing.__module__, f"{thing.__module__}.{name}"}
    assert homes & ASKED.keys(), f"no page of docs/reference shows {thing.__module__}.{name}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, flags=re.M))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
