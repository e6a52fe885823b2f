"""The tokenizer beside a model, or a note why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from curvescope.tokenizers import HFTokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
NONE = "no tokenizer beside the model: give text as ids, or a tokenizer to cs.text"


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
