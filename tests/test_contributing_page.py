"""CONTRIBUTING.md: its table of packages is the import contract, and the files of its recipes exist."""

from __future__ import annotations

import re

import pytest

from import_contract import ROOT, SOURCE, layers

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|yml|lock)|\w/))`", PAGE)))
LATER = {"studies/NAME/", "site/"}  # opened or made by somebody
HOMES = [
    ".",
    "algorithms",
    "closed_form",
    "studies/heads",
    "studies/blocks",
    "kernels/activations",
    "papers/ormaniec2025",
    "papers/molina2023",
]


def test_the_table_of_packages_is_the_import_contract():
    table = PAGE.split("| package |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", table, flags=re.M)
    assert [re.findall(r"`(\w+)(?:/|\.py)`", cell) for cell in cells] == layers()


@pytest.mark.parametrize("path", sorted(set(PATHS) - LATER))
def test_files_that_are_named_exist(path):
    assert (ROOT / path).exists() or any((SOURCE / home / path).exists() for home in HOMES)
