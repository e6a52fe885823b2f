"""Loading from the hub, its cache, or a folder of transformers. Code that comes with a model is never run."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import torch

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError
from curvescope.core.requirements import how_to_install
from curvescope.models.adapters import family_of
from curvescope.models.hf.module import adapt
from curvescope.models.model import Model
from curvescope.models.running.weights.widening import HALVES
from curvescope.tokenizers import HFTokenizer

LOG = logging.getLogger("curvescope")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)
_HEADS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "Model": "AutoModel",
}


def is_hub_id(source: str) -> bool:
    """Return True if a string could be the name of a model on the hub: `name` or `owner/name`."""
    return len(source) <= 96 and _HUB_ID.fullmatch(source) is not None and not source.endswith(".toml")


def read_hub(source: str, *, revision: str | None, dtype: torch.dtype) -> Model:
    """Load a model of the hub, from the cache if possible; HF_HUB_OFFLINE is respected."""
    transformers()
    location: dict[str, Any] = {} if revision is None else {"revision": revision}
    location |= {} if reachable() else {"local_files_only": True}
    name = source if revision is None else f"{source}@{revision}"
    return _read(source, location, dtype=dtype, name=name)


def reachable() -> bool:
    """Return True if the hub accepts a connection. Without this check the client retries for a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if {"http", "https", "all"} & getproxies().keys():
        return True  # a proxy resolves names itself
    hub = urlparse(constants.ENDPOINT)
    port = hub.port or (443 if hub.scheme == "https" else 80)
    try:
        socket.create_connection((hub.hostname, port), 5).close()
    except OSError:
        return False
    return True


def read_hf_folder(folder: Path, *, dtype: torch.dtype) -> Model:
    """Load the model in a folder with config.json and weights."""
    check_folder(folder)
    return _read(str(folder), {}, dtype=dtype, name=folder.name)


def read_gguf(path: Path, *, dtype: torch.dtype) -> Model:
    """Load the model in a GGUF file; transformers dequantizes the weights."""
    transformers()
    if find_spec("gguf") is None:
        raise MissingExtra(f"reading {path.name} needs the package gguf", hint="pip install gguf accelerate")
    model = _read(str(path.parent), {"gguf_file": path.name}, dtype=dtype, name=path.stem)
    note = "weights come from a GGUF file: curvature is that of the rounded weights"
    return replace(model, notes=(*model.notes, note))


def check_folder(folder: Path) -> None:
    """Raise unless the folder has a readable configuration and weights."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CurvescopeError(f"expected a configuration in JSON, could not read {path}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"expected a config.json with a model_type, but {path} has none")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UsageError(
            f"expected model.safetensors or pytorch_model.bin in the folder {folder}, found neither"
        )


def transformers() -> Any:
    """Import transformers, or raise MissingExtra."""
    try:
        import transformers as package
    except ImportError as error:
        raise MissingExtra(
            "models of the hub and their folders need the package transformers",
            hint=how_to_install("transformers"),
        ) from error
    return package


def _read(source: str, location: dict[str, Any], *, dtype: torch.dtype, name: str) -> Model:
    """Read configuration, weights and tokenizer; `location` are keywords for all three."""
    package = transformers()
    location = {**location, "trust_remote_code": False}
    with _quiet(package):
        try:
            config = package.AutoConfig.from_pretrained(source, **location)
            loader = _loader(package, config)
            # without this, transformers also looks for an adapter on the hub
            local = {"local_files_only": True} if location.get("local_files_only") else {}
            module, report = loader.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                weights_only=True,
                output_loading_info=True,
                adapter_kwargs=local,
                **location,
            )
        except Exception as error:  # errors of transformers, the hub, safetensors and json
            raise translate_error(error, name) from error
        _check_report(report, source)
        reads_tokens = getattr(module, "main_input_name", "input_ids") == "input_ids"
        tokenizer, note = read_tokenizer(package, source, location) if reads_tokens else (None, None)
        model = adapt(module.eval(), name=name, tokenizer=tokenizer, own=True)
    notes = [n for n in (note, _widened(config, dtype)) if n is not None]
    return replace(model, notes=(*model.notes, *notes)) if notes else model


def _widened(config: Any, dtype: torch.dtype) -> str | None:
    """Return the log message for weights that were published in a smaller type than they are read in."""
    published = getattr(config, "dtype", None)
    if published not in HALVES or dtype in HALVES:
        return None
    kinds = [str(kind).removeprefix("torch.") for kind in (published, dtype)]
    note = f"weights are published in {kinds[0]} and converted to {kinds[1]}"
    LOG.info("%s (dtype=%r keeps them and converts layer by layer)", note, kinds[0])
    return note


def _loader(package: Any, config: Any) -> Any:
    """Return the auto class for the head that the weights were saved with."""
    saved = (getattr(config, "architectures", None) or [""])[0]
    for ending, auto in _HEADS.items():
        if saved.endswith(ending):
            return getattr(package, auto)
    family = family_of(config.model_type)
    if not saved and family is not None and family.causal:
        return package.AutoModelForCausalLM
    return getattr(package, saved, package.AutoModel)


def _check_report(report: Any, source: str) -> None:
    """Raise if parameters are missing in the weights, so that they would be random."""
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise CurvescopeError(
            f"the weights of {source} lack {len(missing)} parameters, which would be random: {missing[0]!r}",
            hint="build the module with transformers and pass it: cs.load(module)",
        )
    if report.get("unexpected_keys"):
        LOG.info("%s: weights that the model does not use were ignored", source)


@contextmanager
def _quiet(package: Any) -> Iterator[None]:
    """Switch progress bars and warnings of transformers off inside."""
    logs = package.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


_CAUSES: dict[str, tuple[str, str | None]] = {
    "GatedRepoError": (
        "expected access to {source}, which is gated",
        "accept its conditions on its page, then log in: hf auth login",
    ),
    "RevisionNotFoundError": (
        "expected a revision of {name}, but {revision!r} does not exist",
        None,
    ),
    "RepositoryNotFoundError": (
        "expected a model of the hub, but {source!r} does not exist or is private",
        "check the name; for a folder, give its path",
    ),
    "LocalEntryNotFoundError": (
        "{source!r} is not in the cache, and {why}",
        "give a folder, or load it once with a network",
    ),
}
_BROKEN_OFF = (
    "the download of {source} broke off",
    "load it again: finished files and large parts are cached",
)
_MESSAGES: dict[str, tuple[str, str | None]] = {
    "safetensors": ("could not read the weights in {source}", "the file may be truncated"),
    "trust_remote_code": (
        "{source} comes with its own code, which is never run",
        "build the module yourself and pass it: cs.load(module)",
    ),
    "does not recognize this architecture": (
        "the installed transformers does not support the architecture of {source}",
        "pip install --upgrade transformers",
    ),
    "couldn't connect": _CAUSES["LocalEntryNotFoundError"],
    "Cannot send a request": _CAUSES["LocalEntryNotFoundError"],
    "peer closed connection": _BROKEN_OFF,
    "Consistency check failed": _BROKEN_OFF,
    "does not appear to have a file named": (
        "expected a model with config.json and weights, but {source} lacks one of them",
        None,
    ),
    "size mismatch": ("the weights in {source} do not fit the configuration beside them", None),
    "ignore_mismatched_sizes": ("the weights in {source} do not fit the configuration beside them", None),
    "Weights only load failed": (
        "expected weights only, but {source} has a pickle with other Python objects, which are never loaded",
        "convert it to safetensors",
    ),
}


def translate_error(error: Exception, source: str) -> CurvescopeError:
    """Translate an error of transformers or of the hub's client into an error that says what to do.

    Args:
        error: The error that loading raised.
        source: The model, as NAME or NAME@REVISION.
    """
    if isinstance(error, CurvescopeError):
        return error
    from huggingface_hub import constants

    chain = list(_chain(error))
    kinds = {c.__name__ for e in chain for c in type(e).__mro__}
    name, _, revision = source.partition("@")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    fields = {"source": source, "name": name, "revision": revision, "why": reason}
    for kind, (message, hint) in _CAUSES.items():
        if kind in kinds:
            return UsageError(message.format(**fields), hint=hint)
    for word, (message, hint) in _MESSAGES.items():
        if any(word.lower() in f"{type(e).__module__} {e}".lower() for e in chain):
            return CurvescopeError(message.format(**fields), hint=hint)
    first_line = str(error).strip().split("\n", 1)[0][:200].rstrip(". ")
    return CurvescopeError(f"transformers could not load {source}: {type(error).__name__}: {first_line}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
NO_TOKENIZER = "the model has no tokenizer: give text as ids, or pass a tokenizer to cs.text_data"


def read_tokenizer(
    package: Any, source: str, location: dict[str, Any]
) -> tuple[HFTokenizer | None, str | None]:
    """Return the tokenizer, or None and a note on why there is none."""
    folder = Path(source)
    if (
        folder.is_dir()
        and "gguf_file" not in location
        and not any((folder / name).exists() for name in _FILES)
    ):
        return None, NO_TOKENIZER
    try:
        tokenizer = HFTokenizer(package.AutoTokenizer.from_pretrained(source, **location))
    except Exception as error:  # the model can be used without a tokenizer
        reason = str(error).strip().split("\n", 1)[0][:120].rstrip(". ")
        return None, f"no tokenizer: {type(error).__name__}: {reason}"
    if tokenizer.vocab_size <= 1:
        return None, "no tokenizer: its files have only one token"
    return tokenizer, None


CONFIG = "adapter_config.json"


def read_lora(folder: Path, *, dtype: torch.dtype) -> Model:
    """Load the model named in a folder's adapter_config.json, with the folder's LoRA matrices in it."""
    base = _base(folder, _read_config(folder), dtype)
    try:
        options = {"torch_device": "cpu", "is_trainable": True}  # only the LoRA matrices are trainable
        module = _peft().PeftModel.from_pretrained(base.module, str(folder), **options)
    except Exception as error:  # errors of PEFT, torch and safetensors
        raise translate_error(error, str(folder)) from error
    tokenizer = base.tokenizer
    if (folder / "tokenizer_config.json").exists():
        tokenizer, _ = read_tokenizer(transformers(), str(folder), {"trust_remote_code": False})
    return adapt(module.to(dtype).eval(), name=folder.name, tokenizer=tokenizer, own=True)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CurvescopeError(f"expected a configuration in JSON, could not read {path}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise UsageError(
            f"expected LoRA in {path}, got {kind!r}", hint="load it with peft and pass it: cs.load(module)"
        )
    if not isinstance(config.get("base_model_name_or_path"), str):
        raise UsageError(f"expected base_model_name_or_path in {path}, found none")
    return config


def _base(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> Model:
    """Load the model without LoRA: from a folder, here or next to the LoRA folder, or from the hub."""
    name = config["base_model_name_or_path"]
    for path in (Path(name), folder / name):
        if (path / "config.json").exists():
            return read_hf_folder(path, dtype=dtype)
    if not is_hub_id(name):
        raise UsageError(f"{folder / CONFIG} names the model {name}, which does not exist")
    return read_hub(name, revision=config.get("revision"), dtype=dtype)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra(
            "a folder of LoRA matrices needs the package peft", hint=how_to_install("peft")
        ) from error
    return peft
