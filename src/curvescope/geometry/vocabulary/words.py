"""Words for probes: 100 common nouns, or any list, as single tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.geometry.vocabulary.names import TokenNames, single_tokens

Form = Literal["auto", "bare", "space"]
FEW = 10  # common nouns that a tokenizer must have, else words of its own vocabulary are taken


@dataclass(frozen=True)
class Words(Result):
    """Words that are one token each, and what was left out."""

    words: list[str]
    ids: np.ndarray  # (n,)
    dropped: list[str]  # more than one token
    form: str  # bare, space, ids or vocabulary
    note: str  # how many were kept, in a sentence


@cache
def common_nouns() -> tuple[str, ...]:
    """The 100 nouns that ship with the package."""
    text = (files("curvescope.geometry.vocabulary") / "common_nouns.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def select_words(tokenizer: Any, words: Sequence[str | int] | None = None, *, form: Form = "auto") -> Words:
    """The words that are a single token.

    Args:
        words: text, or token ids; default the common nouns, or, where the tokenizer has fewer than ten of
            these, words of its own vocabulary.
        form: `bare`, `space` (with one before the word), or `auto`: with a space unless more words are
            single tokens without it.
    """
    if form not in ("auto", "bare", "space"):
        raise UsageError(f"form: expected auto, bare or space, got {form!r}")
    if words is not None and words and all(isinstance(word, int | np.integer) for word in words):
        return _ids(tokenizer, [int(word) for word in words])  # pyright: ignore[reportArgumentType]
    if tokenizer is None:
        raise UsageError(
            "expected a tokenizer to find words with, the model has none",
            hint="give one (tokenizer=…), or token ids instead of words",
        )
    wanted = [str(word) for word in (common_nouns() if words is None else words)]
    kept, used = _choose(tokenizer, wanted, form)
    if words is None and len(kept) < FEW:
        return vocabulary_words(tokenizer, found=len(kept))
    if not kept:
        raise UsageError(
            f"expected words that are single tokens, none of {len(wanted)} is",
            hint="vocabulary_words(tokenizer) lists words that are; token ids can be given too",
        )
    dropped = [word for word in wanted if word not in kept]
    how = "with a space before them" if used == "space" else "without a space before them"
    note = f"{len(kept)} of {len(wanted)} words are single tokens {how}"
    return Words(list(kept), np.array(list(kept.values()), dtype=np.int64), dropped, used, note)


def vocabulary_words(tokenizer: Any, *, num: int = 100, found: int | None = None) -> Words:
    """The first `num` tokens of a vocabulary that are words of three letters or more."""
    names = TokenNames(tokenizer)
    texts = {i: names.text(i) for i in names.ids()}
    fits = {
        i: t
        for i, t in texts.items()
        if len(t.strip()) > 2 and t.strip().isalpha() and t.lstrip(" ") == t.strip()
    }
    spaced = [i for i, t in fits.items() if t.startswith(" ")]
    chosen = sorted((spaced if len(spaced) >= FEW else list(fits))[:num])
    if not chosen:
        raise UsageError(
            "expected a vocabulary with words of three letters or more, found none",
            hint="give token ids instead of words",
        )
    front = "" if found is None else f"only {found} of {len(common_nouns())} common nouns are single tokens: "
    note = f"{front}{len(chosen)} words of the vocabulary itself"
    return Words([fits[i].strip() for i in chosen], np.array(chosen, dtype=np.int64), [], "vocabulary", note)


def _choose(tokenizer: Any, wanted: list[str], form: Form) -> tuple[dict[str, int], str]:
    if form != "auto":
        return single_tokens(tokenizer, wanted, space=form == "space"), form
    spaced, bare = (single_tokens(tokenizer, wanted, space=space) for space in (True, False))
    return (spaced, "space") if len(spaced) >= len(bare) else (bare, "bare")


def _ids(tokenizer: Any, ids: list[int]) -> Words:
    names = TokenNames(tokenizer)
    return Words(names.texts(ids), np.array(ids, dtype=np.int64), [], "ids", f"{len(ids)} tokens given by id")
