"""Loading from the hub, its cache, or a folder that transformers wrote. No code of a model is ever run."""

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
    """Whether a string could be the name of a model on the hub: `name` or `owner/name`."""
    return len(source) <= 96 and _HUB_ID.fullmatch(source) is not None and not source.endswith(".toml")


def read_hub(source: str, *, revision: str | None, dtype: torch.dtype) -> Model:
    """A model of the hub, from the cache where it is there; HF_HUB_OFFLINE is respected."""
    transformers()
    where: dict[str, Any] = {} if revision is None else {"revision": revision}
    where |= {} if reachable() else {"local_files_only": True}
    name = source if revision is None else f"{source}@{revision}"
    return _read(source, where, dtype=dtype, name=name)


def reachable() -> bool:
    """Whether the hub's name can be looked up; asked first, because its retries take half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def read_hf_folder(folder: Path, *, dtype: torch.dtype) -> Model:
    """The model in a folder with config.json and weights."""
    check_folder(folder)
    return _read(str(folder), {}, dtype=dtype, name=folder.name)


def read_gguf(path: Path, *, dtype: torch.dtype) -> Model:
    """The model in a GGUF file, its weights made real numbers again by transformers."""
    transformers()
    if find_spec("gguf") is None:
        raise MissingExtra(f"reading {path.name} needs the package gguf", hint="pip install gguf accelerate")
    model = _read(str(path.parent), {"gguf_file": path.name}, dtype=dtype, name=path.stem)
    note = "weights come from a GGUF file: curvature is that of the rounded weights"
    return replace(model, notes=(*model.notes, note))


def check_folder(folder: Path) -> None:
    """Raise unless the folder has a readable configuration and weights beside it."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CurvescopeError(f"expected a configuration in JSON, could not read {path}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"expected a config.json with a model_type, {path} has none")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UsageError(
            f"expected model.safetensors or pytorch_model.bin in the folder {folder}, found neither"
        )


def transformers() -> Any:
    """The package, or one sentence that it is missing."""
    try:
        import transformers as package
    except ImportError as error:
        raise MissingExtra(
            "models of the hub and their folders need the package transformers",
            hint=how_to_install("transformers"),
        ) from error
    return package


def _read(source: str, where: dict[str, Any], *, dtype: torch.dtype, name: str) -> Model:
    """Configuration, weights and tokenizer; `where` are keywords that all three take."""
    package = transformers()
    where = {**where, "trust_remote_code": False}
    with _quiet(package):
        try:
            config = package.AutoConfig.from_pretrained(source, **where)
            loader = _loader(package, config)
            # transformers looks for an adapter on the hub too, unless this is said again
            local = {"local_files_only": True} if where.get("local_files_only") else {}
            module, report = loader.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                weights_only=True,
                output_loading_info=True,
                adapter_kwargs=local,
                **where,
            )
        except Exception as error:  # transformers raises its own, the hub's, safetensors' and json's
            raise one_sentence(error, source, where.get("revision")) from error
        _check_report(report, source)
        wants = getattr(module, "main_input_name", "input_ids") == "input_ids"
        tokenizer, note = read_tokenizer(package, source, where) if wants else (None, None)
        model = adapt(module.eval(), name=name, tokenizer=tokenizer, own=True)
    notes = [n for n in (note, _widened(config, dtype)) if n is not None]
    return replace(model, notes=(*model.notes, *notes)) if notes else model


def _widened(config: Any, dtype: torch.dtype) -> str | None:
    """What to say where weights are published in less than the type they are read in; in the log, once."""
    published = getattr(config, "dtype", None)
    if published not in HALVES or dtype in HALVES:
        return None
    kinds = [str(kind).removeprefix("torch.") for kind in (published, dtype)]
    note = f"weights are published in {kinds[0]}, and widened to {kinds[1]}"
    LOG.info("%s (dtype=%r keeps them so, and widens layer by layer)", note, kinds[0])
    return note


def _loader(package: Any, config: Any) -> Any:
    """The auto class for the head that the weights were saved with."""
    saved = (getattr(config, "architectures", None) or [""])[0]
    for ending, auto in _HEADS.items():
        if saved.endswith(ending):
            return getattr(package, auto)
    family = family_of(config.model_type)
    if not saved and family is not None and family.causal:
        return package.AutoModelForCausalLM
    return getattr(package, saved, package.AutoModel)


def _check_report(report: Any, source: str) -> None:
    """Raise where parameters were left at random, because the weights do not hold them."""
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise CurvescopeError(
            f"the weights of {source} lack {len(missing)} parameters, which would be random: {missing[0]!r}",
            hint="build the module with transformers and pass it: cs.load(module)",
        )
    if report.get("unexpected_keys"):
        LOG.info("%s: weights that the model has no place for were left out", source)


@contextmanager
def _quiet(package: Any) -> Iterator[None]:
    """No progress bars and warnings of transformers inside; as they were after."""
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
        "expected a revision of {source}, got {revision!r}, which it does not have",
        None,
    ),
    "RepositoryNotFoundError": (
        "expected a model of the hub, got {source!r}, which is not there or is private",
        "check the name; for a folder, give its path",
    ),
    "LocalEntryNotFoundError": (
        "{source!r} is not in the cache, and the hub cannot be reached",
        "give a folder, or load it once with a network",
    ),
    "OfflineModeIsEnabled": (
        "{source!r} is not in the cache, and HF_HUB_OFFLINE is set",
        "give a folder, or load it once with a network",
    ),
}
_WORDS: dict[str, tuple[str, str | None]] = {
    "safetensors": ("expected whole weights in {source}, could not read them", "the file may be cut short"),
    "trust_remote_code": (
        "{source} needs code of its own, which is never run",
        "build the module yourself and pass it: cs.load(module)",
    ),
    "does not recognize this architecture": (
        "{source} is of a type that this transformers does not know",
        "pip install --upgrade transformers",
    ),
    "couldn't connect": _CAUSES["LocalEntryNotFoundError"],
    "Cannot send a request": _CAUSES["OfflineModeIsEnabled"],
    "does not appear to have a file named": (
        "expected a model with config.json and weights, {source} lacks one of them",
        None,
    ),
    "size mismatch": ("the weights in {source} do not fit the configuration beside them", None),
    "ignore_mismatched_sizes": ("the weights in {source} do not fit the configuration beside them", None),
    "Weights only load failed": (
        "expected weights only, {source} holds a pickle with other Python objects, which are never run",
        "convert it to safetensors",
    ),
}


def one_sentence(error: Exception, source: str, revision: str | None = None) -> CurvescopeError:
    """The error that says what a person can do about `error`."""
    if isinstance(error, CurvescopeError):
        return error
    chain = list(_chain(error))
    kinds = {c.__name__ for e in chain for c in type(e).__mro__}
    for name, (message, hint) in _CAUSES.items():
        if name in kinds:
            return UsageError(message.format(source=source, revision=revision), hint=hint)
    for word, (message, hint) in _WORDS.items():
        if any(word.lower() in f"{type(e).__module__} {e}".lower() for e in chain):
            return CurvescopeError(message.format(source=source, revision=revision), hint=hint)
    first = str(error).strip().split("\n", 1)[0][:200].rstrip(". ")
    return CurvescopeError(
        f"expected a model that transformers can load, {source} gave {type(error).__name__}: {first}"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, last cause last."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
NONE = "no tokenizer beside the model: give text as ids, or a tokenizer to cs.text_data"


def read_tokenizer(package: Any, source: str, where: dict[str, Any]) -> tuple[HFTokenizer | None, str | None]:
    """The tokenizer and nothing, or nothing and a note. A model without one is still a model."""
    folder = Path(source)
    if folder.is_dir() and "gguf_file" not in where and not any((folder / name).exists() for name in _FILES):
        return None, NONE
    try:
        found = HFTokenizer(package.AutoTokenizer.from_pretrained(source, **where))
    except Exception as error:  # whatever is wrong with it, the model can still be used
        first = str(error).strip().split("\n", 1)[0][:120].rstrip(". ")
        return None, f"no tokenizer: {type(error).__name__}: {first}"
    if found.vocab_size <= 1:
        return None, "no tokenizer: its files hold one token only"
    return found, None


CONFIG = "adapter_config.json"


def read_lora(folder: Path, *, dtype: torch.dtype) -> Model:
    """The model that a folder with adapter_config.json names, with the folder's LoRA matrices in it."""
    base = _base(folder, _read_config(folder), dtype)
    try:
        where = {"torch_device": "cpu", "is_trainable": True}  # what varies are the LoRA matrices
        module = _peft().PeftModel.from_pretrained(base.module, str(folder), **where)
    except Exception as error:  # PEFT raises its own, torch's and safetensors'
        raise one_sentence(error, str(folder)) from error
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
        raise UsageError(f"expected {path} to name its model as base_model_name_or_path, it does not")
    return config


def _base(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> Model:
    """The model without LoRA: a folder, here or beside the LoRA's, or one of the hub."""
    name = config["base_model_name_or_path"]
    for path in (Path(name), folder / name):
        if (path / "config.json").exists():
            return read_hf_folder(path, dtype=dtype)
    if not is_hub_id(name):
        raise UsageError(f"expected the model of {folder / CONFIG} at {name}, there is none")
    return read_hub(name, revision=config.get("revision"), dtype=dtype)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra(
            "a folder of LoRA matrices needs the package peft", hint=how_to_install("peft")
        ) from error
    return peft
