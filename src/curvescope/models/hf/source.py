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
from curvescope.models.hf.errors import one_sentence
from curvescope.models.hf.module import adapt
from curvescope.models.hf.tokenizer import read_tokenizer
from curvescope.models.model import Model
from curvescope.models.running.weights.widening import HALVES

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
