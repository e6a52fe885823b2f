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
FEW = 10  # with fewer common nouns as single tokens, words of the vocabulary are used


@dataclass(frozen=True)
class Words(Result):
    """Words that are one token each, and words that are not."""

    words: list[str]
    ids: np.ndarray  # (n,)
    dropped: list[str]  # more than one token
    form: str  # bare, space, ids or vocabulary
    note: str  # a sentence on the number of words


@cache
def common_nouns() -> tuple[str, ...]:
    """Return the 100 nouns that ship with the package."""
    text = (files("curvescope.geometry.vocabulary") / "common_nouns.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def select_words(tokenizer: Any, words: Sequence[str | int] | None = None, *, form: Form = "auto") -> Words:
    """Return the words that are a single token.

    Args:
        words: text or token ids; default the common nouns, or words of the vocabulary if the tokenizer has
            fewer than ten of these nouns.
        form: `bare`, `space` (a space before the word), or `auto`: with a space, unless more words are single
            tokens without it.
    """
    if form not in ("auto", "bare", "space"):
        raise UsageError(f"form: expected auto, bare or space, got {form!r}")
    if words is not None and words and all(isinstance(word, int | np.integer) for word in words):
        return _ids(tokenizer, [int(word) for word in words])  # pyright: ignore[reportArgumentType]
    if tokenizer is None:
        raise UsageError(
            "expected a tokenizer to select words, but the model has none",
            hint="pass tokenizer=…, or token ids instead of words",
        )
    candidates = [str(word) for word in (common_nouns() if words is None else words)]
    tokens, used_form = _choose(tokenizer, candidates, form)
    if words is None and len(tokens) < FEW:
        return vocabulary_words(tokenizer, num_found=len(tokens))
    if not tokens:
        raise UsageError(
            f"expected words that are single tokens, got {len(candidates)} words of several tokens",
            hint="vocabulary_words(tokenizer) lists such words; token ids are possible, too",
        )
    dropped = [word for word in candidates if word not in tokens]
    suffix = "with a space before them" if used_form == "space" else "without a space before them"
    note = f"{len(tokens)} of {len(candidates)} words are single tokens {suffix}"
    return Words(list(tokens), np.array(list(tokens.values()), dtype=np.int64), dropped, used_form, note)


def vocabulary_words(tokenizer: Any, *, num: int = 100, num_found: int | None = None) -> Words:
    """Return the first `num` tokens of a vocabulary that are words of three letters or more."""
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
    prefix = (
        ""
        if num_found is None
        else f"only {num_found} of {len(common_nouns())} common nouns are single tokens: "
    )
    note = f"{prefix}{len(chosen)} words of the vocabulary itself"
    return Words([fits[i].strip() for i in chosen], np.array(chosen, dtype=np.int64), [], "vocabulary", note)


def _choose(tokenizer: Any, candidates: list[str], form: Form) -> tuple[dict[str, int], str]:
    if form != "auto":
        return single_tokens(tokenizer, candidates, space=form == "space"), form
    spaced, bare = (single_tokens(tokenizer, candidates, space=space) for space in (True, False))
    return (spaced, "space") if len(spaced) >= len(bare) else (bare, "bare")


def _ids(tokenizer: Any, ids: list[int]) -> Words:
    names = TokenNames(tokenizer)
    return Words(names.texts(ids), np.array(ids, dtype=np.int64), [], "ids", f"{len(ids)} tokens given by id")
