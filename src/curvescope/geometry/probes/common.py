"""What the probes of keys and of values share: words among tokens, the search, and chance beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.vocabulary.decode import measures, rows_at, top_rows
from curvescope.geometry.vocabulary.names import TokenNames, names_of
from curvescope.geometry.vocabulary.references import Reference
from curvescope.geometry.vocabulary.representations import How, Representation, represent
from curvescope.geometry.vocabulary.words import Form, Words, select_words
from curvescope.models.model import Model

if TYPE_CHECKING:
    import pandas as pd

Search = tuple[Reference, Tensor, Tensor]
"""Rows to search among, directions of the words (n, d), directions of random tokens (R, d)."""
NUMBERS = ("scores", "cosine", "fraction", "z", "percentile")


@dataclass(frozen=True, eq=False)
class Probing:
    """What a probe begins with: heads, tokens as the block meets them, words and random tokens among them."""

    layer: int
    own: list[Circuit]
    words: Words
    tokens: Representation
    at: Tensor  # (n,) the words' positions in tokens.ids
    random: Tensor  # (R,)
    names: TokenNames
    seed: int
    notes: list[str]

    @property
    def rows(self) -> Reference:
        """What attention reads of every token, as its heads expect it."""
        return self.tokens.reads(folded=self.own[0].folded)

    @property
    def head_notes(self) -> list[str]:
        """What the matrices of the heads leave out."""
        return [note for note in self.own[0].note.split("; ") if note]


def begin(
    model: Model,
    layer: int,
    words: Sequence[str | int] | None,
    *,
    tokens: Representation | None,
    k: int,
    num_random: int,
    seed: int,
    folded: bool,
    form: Form,
    tokenizer: Any,
    how: How = "auto",
    position: int = 0,
    corpus: Tensor | None = None,
) -> Probing:
    """Find the words among the tokens of a block, and draw random tokens; options as in `probe_keys`."""
    own = heads(model, layer, folded=folded)
    source = model.tokenizer if tokenizer is None else tokenizer
    if k < 1 or num_random < 2:
        raise UsageError(f"expected k of at least 1 and num_random of at least 2, got {k} and {num_random}")
    chosen = select_words(source, words, form=form)
    if tokens is None:
        tokens = represent(model, layer, how=how, position=position, corpus=corpus, tokenizer=source)
    at = tokens.positions(chosen.ids)
    notes = [chosen.note, tokens.note]
    if bool((at < 0).any()):
        notes.append(f"{int((at < 0).sum())} words are left out: they have no representation")
        chosen, at = _kept(chosen, (at >= 0).numpy()), at[at >= 0]
    if not len(at):
        raise UsageError(
            "expected words that have a representation, none has", hint="a larger corpus, or how='run'"
        )
    random = torch.randint(0, len(tokens.ids), (num_random,), generator=generator(seed))
    notes.append(f"z and percentile are against {num_random} random tokens in the word's place")
    return Probing(layer, own, chosen, tokens, at, random, names_of(source), seed, notes)


def _kept(words: Words, kept: np.ndarray) -> Words:
    own = [word for word, keep in zip(words.words, kept, strict=True) if keep]
    gone = [word for word, keep in zip(words.words, kept, strict=True) if not keep]
    return Words(own, words.ids[kept], [*words.dropped, *gone], words.form, words.note)


def _nearest(searches: list[Search], k: int) -> list[Tensor]:
    """The best rows (n, k) of every search; one go over the vocabulary where all have the same rows."""
    rows = searches[0][0]
    if all(keys is rows for keys, _, _ in searches):
        at, _ = top_rows(torch.cat([v for _, v, _ in searches]), rows, k=k)
        return list(at.split([len(v) for _, v, _ in searches]))
    return [top_rows(v, keys, k=k)[0] for keys, v, _ in searches]


def above(v: Tensor, random: Tensor, at: Tensor, source: Reference) -> tuple[Tensor, Tensor]:
    """How far the scores at `at` (n, k) are above those of random directions: z and percentile.

    The percentile counts scores that are equal to nine digits by half: the word itself may be drawn.
    """
    z, percentile = (torch.empty(at.shape, dtype=torch.float64) for _ in range(2))
    for part, rows in rows_at(at, source):
        own, chance = (rows * v[part, None]).sum(-1), rows @ random.T  # the bias of a row is in both
        spread = chance.std(-1, keepdim=True)
        spread = torch.where(spread > 0, spread, torch.full_like(spread, torch.nan))
        beyond = (own[..., None] - chance) / spread  # how far each one is below
        z[part] = beyond.mean(-1)
        above, equal = beyond > 1e-9, beyond.abs() <= 1e-9
        percentile[part] = 100 * (above.double() + 0.5 * equal.double()).mean(-1)
    return z, percentile


def found_by(searches: list[Search], source: Reference, probing: Probing, k: int) -> dict[str, Any]:
    """The fields that both results share, from one search per head (axis 1); `source` has the tokens' ids."""
    parts = []
    for (keys, v, random), at in zip(searches, _nearest(searches, k), strict=True):
        parts.append((at, *measures(v, at, keys), *above(v, random, at, keys)))
    at, *numbers = (torch.stack(column, dim=1) for column in zip(*parts, strict=True))
    ids = source.ids[at]
    text, raw = probing.names.nested(ids)
    return {
        "layer": probing.layer,
        "words": probing.words.words,
        "word_ids": probing.words.ids,
        "ids": ids.numpy(),
        **{name: x.numpy() for name, x in zip(NUMBERS, numbers, strict=True)},
        "text": text,
        "bytes": raw,
        "num_random": len(probing.random),
        "seed": probing.seed,
    }


def frame(probe: Any, heads: list[Any]) -> pd.DataFrame:
    """One row per word, head and rank of a probe; `heads` are the names of axis 1."""
    import pandas as pd

    rows = []
    n, num_heads, k = probe.ids.shape
    for w, h, r in np.ndindex(n, num_heads, k):
        row = {"word": probe.words[w], "head": heads[h], "rank": r + 1, "id": int(probe.ids[w, h, r])}
        row |= {"text": probe.text[w][h][r], "bytes": probe.bytes[w][h][r]}
        for name in NUMBERS:
            row[name.removesuffix("s")] = float(getattr(probe, name)[w, h, r])
        rows.append(row)
    return pd.DataFrame(rows)
