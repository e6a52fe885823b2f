"""Pages of docs: their code and commands are run, and print what the page says behind them.

A block of text behind a block of code is its output: the same words, and numbers that are close (others'
processors round otherwise). What a command prints, with error bars and times, is compared by its words, and
without the name of the folder that it is called in.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from curvescope.cli import main

FOLDER = Path(__file__).parent.parent / "docs"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
BARS = re.compile(r"[▁▂▃▄▅▆▇█░]+")
FOLDER_OF_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


def run(name: str, *, numbers: bool = True) -> dict[str, Any]:
    """Run a page in the current folder, with or without a look at its numbers; the names it leaves behind."""
    page = (FOLDER / name).read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    printed, words_alone = "", False
    for kind, text in re.findall(r"```(python|bash|text)\n(.*?)```", page, flags=re.S):
        if kind == "text":
            if printed:
                compare(printed, text, words_alone=words_alone)
            printed = ""
            continue
        assert not printed, f"the page does not show what this prints:\n{printed}"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if kind == "python":
                exec(compile(text, f"docs/{name}", "exec"), space)
            else:
                main_quietly(text.split())
        printed, words_alone = out.getvalue().replace(f"{Path.cwd()}/", ""), kind == "bash" or not numbers
    assert not printed
    return space


def main_quietly(words: list[str]) -> None:
    """A command that ends well."""
    assert words[0] == "curvescope"
    with contextlib.suppress(SystemExit):
        main(words[1:])


def compare(printed: str, said: str, *, words_alone: bool = False) -> None:
    """Line by line: the words, then the numbers."""
    found, page = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, said))
    assert len(found) == len(page), printed
    for ours, theirs in zip(found, page, strict=True):
        assert sorted(skeleton(ours)) == sorted(skeleton(theirs))  # of two numbers alike either may be first
        if not words_alone:
            numbers = [float(word) for word in NUMBER.findall(ours)]
            assert numbers == pytest.approx([float(w) for w in NUMBER.findall(theirs)], rel=0.1, abs=0.02)


def skeleton(line: str) -> list[str]:
    """The words of a line, without numbers, bars and names of run folders."""
    return BARS.sub("", NUMBER.sub("#", FOLDER_OF_RUN.sub("", line))).split()
