"""Parse command line input into settings of a study, with error messages about options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from curvescope.cli.typed.options import SETTINGS
from curvescope.core.config import Config, Settings, Value
from curvescope.core.errors import CurvescopeError, UsageError

AUTO = "auto"
LOADED = re.compile(r"cs\.load\(…, ([^)]*)\)")  # what is said to who writes Python
ASSIGNED = re.compile(r"(?<![\w-])(?:--set )?(\w+)=([^\s,;)]+)")


def merge(
    kinds: Sequence[type[Config]], config: Path | None, pairs: Sequence[str], given: Settings
) -> dict[str, Value]:
    """Settings from a TOML file, then KEY=VALUE pairs, then options: the later wins.

    Args:
        kinds: configurations whose types tell how a value is meant; the first that has the name.
        given: options; None and empty lists are not given.
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
    """Settings in which the device `auto`, the default of the command line, is CUDA if there is one.

    The choice of CUDA is said. Without CUDA `auto` is left out, and the setting keeps its default, the CPU.
    """
    found = {name: value for name, value in settings.items() if name != "device" or value not in (None, AUTO)}
    if "device" not in found:
        import torch

        if torch.cuda.is_available():
            found["device"] = "cuda"
            say(f"device: cuda ({torch.cuda.get_device_name()}), chosen by --device auto")
    return found


def split(words: Sequence[str] | None) -> list[str]:
    """The values of an option that may be given several times, each `a` or `a,b`."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def names_of(kind: type[Config]) -> list[str]:
    """The names of the settings."""
    return [field.name for field in fields(kind)]


def check_options(study: str, kind: type[Config], given: Settings) -> None:
    """Raise where an option is given that the study has no use for."""
    known = names_of(kind)
    for option, value in given.items():
        if value in (None, []) or option in known:
            continue
        instead = "--set layers=0,1 chooses layers" if option == "blocks" and "layers" in known else ""
        word = option if option == "model" else f"--{option}"
        raise UsageError(
            f"the study {study} takes no {word}, got {_spoken(value)}",
            hint=instead or f"its settings: curvescope run {study} --settings",
        )


@contextmanager
def spoken(study: str, kind: type[Config]) -> Iterator[None]:
    """Errors inside have hints in the syntax of the command line, and say where settings are listed."""
    try:
        yield
    except CurvescopeError as error:
        if error.hint is not None:
            hint = LOADED.sub(r"\1", error.hint)
            error.hint = ASSIGNED.sub(lambda found: _option(found, kind), hint)
        if error.message.startswith("unknown setting"):
            error.hint = f"{error.hint}; all of them: curvescope run {study} --settings"
        raise


def _option(found: re.Match[str], kind: type[Config]) -> str:
    """`tokens=63` as `--tokens 63`, `seq_len=64` as `--set seq_len=64`; what is no setting stays."""
    name, value = found[1], found[2].strip("'\"")
    setting = next((each for each in kind.settings() if each.name == name), None)
    if setting is None:
        return found[0]
    return f"--{name} {value}" if name in SETTINGS or setting.option else f"--set {name}={value}"


def _spoken(value: Value) -> str:
    return repr(value[0]) if isinstance(value, list) and len(value) == 1 else repr(value)


def _from_file(path: Path) -> dict[str, Value]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"expected settings in TOML, could not read {path}: {error}") from error
    return {key: value for key, value in found.items() if key not in ("study", "version")}  # of a run folder
