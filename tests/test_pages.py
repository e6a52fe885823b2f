"""Every page of docs: its code is run somewhere, and the commands that it shows can be given."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import guides
from curvescope.cli.app import app
from curvescope.cli.arguments.options import study_options_as_settings
from curvescope.studies import run_study

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
OWN = {  # pages with a test of their own, which runs their code and asks more of it
    "activations.md": "test_activations_page.py",
    "algebra.md": "test_algebra_page.py",
    "architecture.md": "test_architecture_page.py",
    "coming_from.md": "test_coming_from_page.py",
    "diagnose.md": "test_diagnose_page.py",
    "dynamics.md": "test_dynamics_page.py",
    "estimators.md": "test_estimators_page.py",
    "geometry.md": "geometry/test_geometry_page.py",
    "guides/compare.md": "test_guides.py",
    "guides/influence.md": "test_influence_page.py",
    "guides/learning_rate.md": "test_guides.py",
    "guides/optimizers.md": "test_optimizers_page.py",
    "guides/pruning.md": "test_surgery_pages.py",
    "guides/quantizing.md": "test_surgery_pages.py",
    "guides/report.md": "test_guides.py",
    "guides/unstable.md": "test_guides.py",
    "kfac.md": "test_kfac_page.py",
    "monitor.md": "test_monitor_page.py",
    "own_modules.md": "test_own_modules_page.py",
    "petrov2025.md": "test_petrov_page.py",
    "second_derivatives.md": "test_second_derivatives_page.py",
    "slides.md": "test_slides_page.py",
    "taylor.md": "test_taylor_page.py",
    "theory/landscape.md": "test_landscape_page.py",
    "transformerlens.md": "test_activations_page.py",
}
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
WITH_CODE = sorted(name for name, text in TEXTS.items() if "```python" in text)
TRAINED = {"concepts/functional.md"}  # 400 steps of training end elsewhere after another rounding
NEEDS = {"howto/figures.md": ("plotly",), "tutorials/checkpoint.md": ("transformers",)}
COMMAND = re.compile(r"^(?:\w+=\S+ |\.venv/bin/)*curvescope (.+?)(?: +#.*| &)?$", flags=re.M)
COMMANDS = sorted(
    {
        (name, line.strip())
        for name, text in TEXTS.items()
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```", text, flags=re.S | re.M)
        for line in COMMAND.findall(block)
    }
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("curvescope.monitor.files.write_figures", lambda result, folder: None)


@pytest.mark.parametrize("name", sorted(set(WITH_CODE) - set(OWN)))
def test_a_page_runs_and_prints_what_it_says(name):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    with torch.random.fork_rng(devices=[]):
        guides.run(name, numbers=name not in TRAINED)


def test_pages_with_a_test_of_their_own_have_one():
    assert set(OWN) <= set(WITH_CODE)
    for page, test in OWN.items():
        code = (TESTS / test).read_text(encoding="utf-8")
        assert Path(page).name in code
        assert "exec(compile(" in code or "guides.run(" in code


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_a_command_that_is_shown_can_be_given(page, line):
    """Its name and its options are known; paths and numbers are anybody's."""
    words = shlex.split(line.replace("$SLURM_ARRAY_TASK_ID", "0"))
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or line.startswith("--"), f"no such command: {line}"
    words = study_options_as_settings(str(command.name), words)
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    asked = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
    assert asked <= known | {"--help"}


PROMISED = {"howto/sharpest_block.md": ("blocks", {"blocks": ["L0.W_[QV]"]}), "howto/heads.md": ("heads", {})}
"""Pages whose command is cheap on a small model: its study, and settings that make it quick."""


@pytest.mark.parametrize("page", PROMISED)
def test_files_that_a_page_promises_are_in_the_run_folder(page, tmp_path):
    study, settings = PROMISED[page]
    model = tmp_path / "small.toml"
    model.write_text(
        "n_layers = 1\nd_model = 8\nn_heads = 2\nd_ff = 8\nvocab_size = 12\nn_ctx = 18\n", encoding="utf-8"
    )
    path, _ = run_study.run(study, {"model": str(model), "data": "task:addition", **settings}, out=tmp_path)
    promised = re.findall(r"`((?:[a-z]+/)?\w+\.(?:csv|png|svg))`", TEXTS[page])
    assert promised
    names = {file.relative_to(path).as_posix() for file in path.rglob("*")}
    for name in promised:
        assert name in names or any(Path(known).name == name for known in names), name
