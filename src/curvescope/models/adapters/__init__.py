"""Adapters: which parameters of a family of models play which role. One file and one line per family."""

from __future__ import annotations

from importlib import import_module

from curvescope.models.adapters.table import Family

FAMILIES = {
    "bert": "bert",
    "distilbert": "distilbert",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma2",
    "gpt2": "gpt2",
    "gpt_neo": "gpt_neo",
    "gpt_neox": "gpt_neox",
    "hooked_transformer": "hooked_transformer",
    "llama": "llama",
    "mamba": "mamba",
    "mistral": "llama",
    "mixtral": "experts",
    "opt": "opt",
    "phi3": "phi3",
    "qwen2": "llama",
    "qwen2_moe": "experts",
    "qwen3": "llama",
    "qwen3_moe": "experts",
    "roberta": "roberta",
    "rwkv": "rwkv",
    "t5": "t5",
    "vit": "vit",
}
"""The configuration's `model_type` to the module beside this one that holds its `FAMILY`."""


def family_of(model_type: str | None) -> Family | None:
    """The declared table of a model type, or None where nobody wrote one."""
    if model_type not in FAMILIES:
        return None
    return import_module(f"curvescope.models.adapters.{FAMILIES[model_type]}").FAMILY
