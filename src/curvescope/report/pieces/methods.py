"""Description of how a figure was made: model, data, probes, errors, seeds, time."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from curvescope.core.config import Config
from curvescope.core.number_format import duration
from curvescope.models.zoo import BUNDLED
from curvescope.report.page_elements import Methods, heading
from curvescope.runs.folder import LOG
from curvescope.runs.study import Study

Settings = Mapping[str, Any]
OPTIONS = ("data", "tokens", "tokenizer", "revision", "dtype", "device", "seed")  # of `curvescope run`
EFFORT = re.compile(r"^num_|probes|steps|products|samples|draws|tolerance")
SEED = re.compile(r"^seeds?$|_seeds?$")
ON = ("tokens", "seq_len", "batch_size", "loss", "dtype", "device", "engine")
ERRORS = re.compile(r"±|interval|standard error|residual|bars? |band|noise|confidence|percentile")
UNSAID = (
    "± is one standard error: numerical (over probes), and where the words beside it say so also sampling "
    "(over other data of this kind and size); intervals are 95 %"
)


def methods(
    name: str,
    what: str,
    caption: str,
    settings: Settings,
    env: Settings,
    time: str,
    command: str,
    *,
    checked: str = "",
) -> Methods:
    """The box under a figure.

    Args:
        what: the question of the study.
        time: how long the run took, in words; "" if unknown.
        checked: errors of the run's own checks, in words; "" where it made none.
    """
    effort = {key: value for key, value in settings.items() if EFFORT.search(key)}
    seeds = {key: value for key, value in settings.items() if SEED.search(key)}
    on = {key: value for key, value in settings.items() if key in ON}
    rows = [
        ("what", f"{heading(name)}: {what}"),
        ("model and data", ", ".join(filter(None, [_model(settings), _listed(on)]))),
        ("probes and effort", _listed(effort)),
        ("errors", errors_in(caption) or UNSAID),
        ("checked", checked),
        ("seeds", _listed(seeds)),
        ("time", ", ".join(filter(None, [time, _machine(env)]))),
        ("versions", _versions(env)),
    ]
    return Methods([(label, words) for label, words in rows if words], command)


def _model(settings: Settings) -> str:
    revision = f"@{settings['revision']}" if settings.get("revision") else ""
    model = f"{Path(str(settings['model'])).name}{revision}" if settings.get("model") else ""
    data = Path(str(settings["data"])).name if settings.get("data") else ""
    return " on ".join(filter(None, [model, data]))


def _listed(settings: Settings) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())


def errors_in(caption: str) -> str:
    """The sentences of a caption that speak of errors."""
    sentences = re.split(r"(?<=[.!?])\s+", caption)
    return " ".join(sentence for sentence in sentences if ERRORS.search(sentence))


def _machine(env: Settings) -> str:
    cuda = env.get("cuda", "none")
    where = cuda if cuda != "none" else f"{env['machine']} processor" if "machine" in env else ""
    threads = f"{env['threads']} threads" if env.get("threads") not in (None, "1") else "1 thread"
    return f"{where}, {threads}" if where and "threads" in env else where


def _versions(env: Settings) -> str:
    return ", ".join(f"{key} {env[key]}" for key in ("curvescope", "torch", "numpy", "python") if key in env)


def time_of(run: Path, begun: datetime) -> str:
    """Return how long a run took, from its log; "" if it was stopped in between."""
    try:
        lines = (run / LOG).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    ends = [line for line in lines if line.endswith(" finished")]
    if not ends or any("resumed" in line for line in lines):
        return ""
    try:
        end = datetime.strptime(ends[-1][:19], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
    seconds = (end - begun).total_seconds()
    return duration(seconds) if seconds >= 0 else ""


def run_command(name: str, study: Study[Any], settings: Settings) -> str:
    """The command that makes a run again: `curvescope run spectrum tiny-gpt --set num_probes=2`.

    Where settings that are not given would be made to fit the machine, the profile full keeps them.
    """
    fitted = study.plan is not None and settings.get("model") not in BUNDLED
    behind = ("--profile", "full") if fitted else ()
    if name == "compare":
        return _compare_command(study.Config, settings, behind)
    return _command(["curvescope", "run", name], study.Config, settings, behind)


def _compare_command(kind: type[Config], settings: Settings, behind: Sequence[str]) -> str:
    """`curvescope compare tiny-gpt@initial tiny-gpt@final`: sides are arguments, data sets options."""
    models, data = settings.get("models"), settings.get("datasets")
    rest = {key: value for key, value in settings.items() if key != "revision"}
    if not models and not data:  # a bundled model by itself: before and after training
        return _command(["curvescope", "run", "compare"], kind, rest, behind)
    revision = f"@{settings['revision']}" if settings.get("revision") else ""
    sides = models or [f"{settings['model']}{revision}"]
    several = [word for one in data or () for word in ("--data", str(one))]
    inside = ("model", "models", "datasets", *(("data",) if several else ()))
    rest = {key: value for key, value in rest.items() if key not in inside}
    return _command(["curvescope", "compare", *map(str, sides), *several], kind, rest, behind)


def reproduce_command(paper: str, figure: str, kind: type[Config], settings: Settings) -> str:
    """The command that makes a figure of a paper again."""
    return _command(["curvescope", "reproduce", paper], kind, settings, ["--figure", figure], ("device",))


def _command(
    words: Sequence[str],
    kind: type[Config],
    settings: Settings,
    behind: Sequence[str] = (),
    options: Sequence[str] = OPTIONS,
) -> str:
    """Words of a command line: what differs from the defaults; the model is an argument."""
    known = {one.name: one.default for one in kind.settings()}
    given = {k: v for k, v in settings.items() if k in known and v != _as_list(known[k])}
    line = [*words, *([str(settings["model"])] if "model" in known and "model" in settings else []), *behind]
    for name, value in given.items():
        if name == "model":
            continue
        text = _typed(kind, name, value)
        line += [f"--{name}", text] if name in options else ["--set", f"{name}={text}"]
    return shlex.join(line)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _typed(kind: type[Config], name: str, value: Any) -> str:
    """A setting as it is typed; in TOML's spelling where the plain one would be read as something else."""
    if isinstance(value, bool):
        return str(value).lower()
    plain = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return plain if kind.read(name, plain) == value else _toml(value)


def _toml(value: Any) -> str:
    import tomli_w

    return tomli_w.dumps({"x": value}).partition("=")[2].strip()
