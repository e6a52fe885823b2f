"""Hints that install what is missing are right however curvescope came here: a wheel, a clone, or a path."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from curvescope.core import requirements
from curvescope.core.requirements import Requirement, how_to_install

SOURCE = Path(requirements.__file__).parents[1]


def test_a_package_is_named_with_the_version_that_is_asked_for(monkeypatch):
    lines = ["torch>=2.11", 'pyright[nodejs]>=1.1; extra == "dev"', "lens<4,>=3.0 ; extra=='lens'"]
    monkeypatch.setattr(requirements, "requires", lambda package: lines)
    assert requirements.requirements() == [
        Requirement("torch", ">=2.11", ""),
        Requirement("pyright", ">=1.1", "dev"),
        Requirement("lens", "<4,>=3.0", "lens"),
    ]
    assert how_to_install("lens") == "pip install 'lens<4,>=3.0'"
    assert how_to_install("accelerate") == "pip install accelerate"


def test_without_metadata_the_name_is_enough(monkeypatch):
    def nothing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(requirements, "requires", nothing)
    assert how_to_install("transformers") == "pip install transformers"


def test_no_hint_asks_for_curvescope_itself_which_a_clone_has_by_another_name():
    said = [path for path in SOURCE.rglob("*.py") if "curvescope[" in path.read_text(encoding="utf-8")]
    assert said == []


def test_what_a_hint_names_is_asked_for_by_the_package():
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    pyproject = (SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r'how_to_install\("([\w-]+)"\)', text))
    assert {"transformers", "datasets", "peft", "umap-learn", "tensorboard", "wandb", "lightning"} <= named
    assert all(re.search(rf'"{name}[<>=]', pyproject) for name in named)
