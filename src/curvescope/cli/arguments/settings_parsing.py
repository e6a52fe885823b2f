"""Parse command line input into settings of a study, with error messages about options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from curvescope.cli.arguments.options import SETTINGS
from curvescope.core.config import Config, Settings, Value
from curvescope.core.errors import CurvescopeError, UsageError

AUTO = "auto"
LOAD_CALL = re.compile(r"cs\.load\(…, ([^)]*)\)")  # hints for users of the Python API
ASSIGNMENT = re.compile(r"(?<![\w-])(?:--set )?(\w+)=([^\s,;)]+)")


def merge(
    kinds: Sequence[type[Config]], config: Path | None, pairs: Sequence[str], given: Settings
) -> dict[str, Value]:
    """Merge settings from a TOML file, from KEY=VALUE pairs and from options; the later source wins.

    Args:
        kinds: configurations that define how to read a value. The first that has the setting is used.
        given: options; None and empty lists mean that the user left them out.
    """
    settings: dict[str, Value] = {} if config is None else _from_file(config)
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise UsageError(f"expected KEY=VALUE after --set, got {pair!r}")
        owner = next((kind for kind in kinds if key in names_of(kind)), kinds[0])
        settings[key] = owner.read(key, text)
    settings.update({key: value for key, value in given.items() if value not in (None, [])})
    return settings


def choose_device(settings: Settings, say: Callable[[str], None]) -> dict[str, Value]:
    """Replace the device `auto`, the default of the command line, by CUDA if available.

    A message announces the choice of CUDA. Without CUDA the setting keeps its default, the CPU.
    """
    resolved = {
        name: value for name, value in settings.items() if name != "device" or value not in (None, AUTO)
    }
    if "device" not in resolved:
        import torch

        if torch.cuda.is_available():
            resolved["device"] = "cuda"
            say(f"device: cuda ({torch.cuda.get_device_name()}), chosen by --device auto")
    return resolved


def split(words: Sequence[str] | None) -> list[str]:
    """Return the values of a repeatable option, each given as `a` or `a,b`."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def names_of(kind: type[Config]) -> list[str]:
    """Return the names of the settings."""
    return [field.name for field in fields(kind)]


def check_options(study: str, kind: type[Config], given: Settings) -> None:
    """Raise UsageError if an option is not a setting of the study."""
    known = names_of(kind)
    for option, value in given.items():
        if value in (None, []) or option in known:
            continue
        instead = "--set layers=0,1 chooses layers" if option == "blocks" and "layers" in known else ""
        word = option if option == "model" else f"--{option}"
        raise UsageError(
            f"the study {study} takes no {word}, got {_value_text(value)}",
            hint=instead or f"to list its settings: curvescope run {study} --settings",
        )


@contextmanager
def with_option_hints(study: str, kind: type[Config]) -> Iterator[None]:
    """Write the hints of errors raised in this block in the syntax of the command line."""
    try:
        yield
    except CurvescopeError as error:
        if error.hint is not None:
            hint = LOAD_CALL.sub(r"\1", error.hint)
            error.hint = ASSIGNMENT.sub(lambda match: _option(match, kind), hint)
        if error.message.startswith("unknown setting"):
            error.hint = f"{error.hint}; to list all settings: curvescope run {study} --settings"
        raise


def _option(match: re.Match[str], kind: type[Config]) -> str:
    """Return `tokens=63` as `--tokens 63`, and `seq_len=64` as `--set seq_len=64`, if it is a setting."""
    name, value = match[1], match[2].strip("'\"")
    setting = next((setting for setting in kind.settings() if setting.name == name), None)
    if setting is None:
        return match[0]
    return f"--{name} {value}" if name in SETTINGS or setting.option else f"--set {name}={value}"


def _value_text(value: Value) -> str:
    return repr(value[0]) if isinstance(value, list) and len(value) == 1 else repr(value)


def _from_file(path: Path) -> dict[str, Value]:
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"expected settings in TOML, could not read {path}: {error}") from error
    # the config.toml of a run folder also has these two keys
    return {key: value for key, value in settings.items() if key not in ("study", "version")}
