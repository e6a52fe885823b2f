"""Every command: examples in its help, options spelled and explained alike, names that are completed."""

from __future__ import annotations

from dataclasses import fields

import pytest
import typer

from commands import call
from curvescope.cli.app import app
from curvescope.cli.arguments.options import SETTINGS
from curvescope.papers import PAPERS
from curvescope.studies import STUDIES
from curvescope.studies.problem_config import ModelOnData

COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
ALIKE = {  # in which commands an option makes sense
    "--json": set(COMMANDS),
    "--quiet": {"run", "diagnose", "compare", "report", "reproduce", "bench", "info"},
    "--seed": {"run", "diagnose", "compare", "report", "bench", "info"},
    "--device": {"run", "diagnose", "compare", "report", "reproduce", "bench", "info"},
    "--dtype": {"run", "diagnose", "compare", "report", "info"},
    "--out": {"run", "diagnose", "compare", "report", "reproduce", "bench", "runs"},
    "--data": {"run", "diagnose", "compare", "report", "info"},
    "--tokens": {"run", "diagnose", "compare", "report", "info"},
    "--tokenizer": {"run", "diagnose", "compare", "report", "info"},
    "--revision": {"run", "diagnose", "report", "info"},
    "--profile": {"run", "compare", "report", "reproduce", "info"},
    "--force": {"run", "diagnose", "compare", "report", "reproduce", "bench"},
    "--set": {"run", "diagnose", "compare", "reproduce", "bench", "info"},
    "--settings": {"run", "compare", "reproduce"},
}
OWN_WORDS = {("--out", "reproduce"), ("--data", "compare")}  # another default; may be repeated


def options(command):
    return {word: option for option in COMMANDS[command].params for word in option.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_begin_with_the_command(command, capsys):
    code, out, _ = call(command, "--help", capsys=capsys)
    assert code == 0
    examples = out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.startswith(f"    curvescope {command}") for line in examples)
    assert "--debug" in out
    for example in examples:  # of options that there are
        given = {word.partition("=")[0] for word in example.split() if word.startswith("--")}
        assert given <= set(options(command))


@pytest.mark.parametrize("option", ALIKE)
def test_an_option_is_where_it_makes_sense_and_means_the_same(option):
    there = {command for command in COMMANDS if option in options(command)}
    assert there == ALIKE[option]
    words = {
        (tuple(found.opts), found.help)
        for command in there
        if (option, command) not in OWN_WORDS
        for found in [options(command)[option]]
    }
    assert len(words) == 1


def test_every_option_and_argument_says_what_it_is():
    for command, found in COMMANDS.items():
        for option in found.params:
            assert getattr(option, "help", ""), (command, option.name)


def test_options_are_the_words_of_the_python_api():
    settings = {field.name for field in fields(ModelOnData)}
    assert {"model", "data", "tokens", "tokenizer", "revision", "dtype", "device", "seed"} <= settings
    assert {f"--{name}" for name in SETTINGS} <= set(options("run"))


COMPLETED = [
    ("run", "study", "spec", "spectrum"),
    ("run", "model", "tiny", "tiny-gpt"),
    ("run", "revision", "ea", "early"),
    ("run", "data", "task:add", "task:addition"),
    ("run", "checkpoints", "ini", "initial"),
    ("run", "profile", "q", "quick"),
    ("info", "model", "tiny", "tiny-gpt"),
    ("diagnose", "model", "tiny", "tiny-gpt"),
    ("diagnose", "dtype", "float", "float64"),
    ("report", "what", "tiny", "tiny-gpt"),
    ("report", "sections", "spectra,he", "spectra,heads"),
    ("report", "device", "cu", "cuda"),
    ("compare", "sides", "tiny-gpt@in", "tiny-gpt@initial"),
    ("reproduce", "paper", "sin", "singh2025"),
]


@pytest.mark.parametrize(("command", "name", "begun", "whole"), COMPLETED)
def test_names_are_completed(command, name, begun, whole):
    found = COMMANDS[command]
    (option,) = [option for option in found.params if option.name == name]
    assert whole in [item.value for item in option.shell_complete(typer.Context(found), begun)]


def test_all_studies_and_papers_are_completed():
    found = {option.name: option for option in COMMANDS["run"].params}
    study = found["study"].shell_complete(typer.Context(COMMANDS["run"]), "")
    assert [item.value for item in study] == list(STUDIES)
    paper = COMMANDS["reproduce"].params[0].shell_complete(typer.Context(COMMANDS["reproduce"]), "")
    assert [item.value for item in paper] == list(PAPERS)


def test_files_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    option = COMMANDS["info"].params[0]
    assert [i.value for i in option.shell_complete(typer.Context(COMMANDS["info"]), "mi")] == ["mine.toml"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["reprot"], "did you mean 'report'"),
        (["spectrum"], "curvescope run spectrum"),
        (["list", "--jsn"], "--json"),
        (["run", "spectrum", "--sed", "1"], "--seed"),
        (["report", "--sections", "spectrs"], "did you mean 'spectra'"),
        (["report", "--profile", "slow"], "quick or full"),
        (["compare", "tiny-gtp", "tiny-gpt"], "did you mean 'tiny-gpt'"),
    ],
)
def test_a_slip_gets_a_hint(words, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*words, capsys=capsys)
    assert (code, out) == (2, "")
    assert hint in err


def test_debug_stands_anywhere(capsys):
    for words in (["--debug", "list"], ["list", "--debug"], ["list", "--json", "--debug"]):
        assert call(*words, capsys=capsys)[0] == 0
