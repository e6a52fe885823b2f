"""The zoo: a readable Transformer and an MLP, and their folders.

The names of `folder` are imported when needed, because the constants here are read without torch.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("curvescope.models.zoo.folder"), name)


BUNDLED = {"tiny-gpt": "GPT of 4 layers, 0.56 million parameters, trained on Python's standard library"}
REVISIONS = ("initial", "early", "middle", "final")
