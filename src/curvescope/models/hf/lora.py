"""Loading a folder that PEFT wrote: LoRA matrices, and the name of the model that they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError
from curvescope.core.requirements import how_to_install
from curvescope.models.hf import source as hf
from curvescope.models.hf.errors import one_sentence
from curvescope.models.hf.module import adapt
from curvescope.models.hf.tokenizer import read_tokenizer
from curvescope.models.model import Model

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
        tokenizer, _ = read_tokenizer(hf.transformers(), str(folder), {"trust_remote_code": False})
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
            return hf.read_hf_folder(path, dtype=dtype)
    if not hf.is_hub_id(name):
        raise UsageError(f"expected the model of {folder / CONFIG} at {name}, there is none")
    return hf.read_hub(name, revision=config.get("revision"), dtype=dtype)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra(
            "a folder of LoRA matrices needs the package peft", hint=how_to_install("peft")
        ) from error
    return peft
