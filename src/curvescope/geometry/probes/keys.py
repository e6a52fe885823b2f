"""Words as probes of heads: which keys their queries look for, and what their values write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.probes.lens import behind_attention, logit_lens
from curvescope.geometry.vocabulary.decode import measures, rows_at, top_rows
from curvescope.geometry.vocabulary.names import TokenNames, names_of
from curvescope.geometry.vocabulary.references import Reference, rows_reference
from curvescope.geometry.vocabulary.representations import How, Representation, represent
from curvescope.geometry.vocabulary.words import Words, select_words
from curvescope.models.model import Model

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class KeyProbe(Result):
    """Nearest keys of every word and head: axes (words, heads, k)."""

    layer: int
    words: list[str]
    word_ids: np.ndarray  # (n,)
    ids: np.ndarray  # (n, H, k)
    scores: np.ndarray  # (n, H, k) attention scores, less what does not depend on the key
    cosine: np.ndarray  # (n, H, k)
    fraction: np.ndarray  # (n, H, k) of the greatest score that any key could have
    z: np.ndarray  # (n, H, k) standard deviations above the same key's scores with random query tokens
    percentile: np.ndarray  # (n, H, k) among them, 0 to 100
    text: list[list[list[str]]]
    bytes: list[list[list[str]]]
    num_random: int
    seed: int
    legacy: bool
    notes: list[str]  # how tokens are represented, how many words were kept, …

    def to_frame(self) -> pd.DataFrame:
        """One row per word, head and rank."""
        return _frame(self, list(range(self.ids.shape[1])))


@dataclass(frozen=True)
class ValueProbe(Result):
    """What every word's value writes, read by the logit lens: head axis 0 … H − 1, then the layer's sum."""

    layer: int
    words: list[str]
    word_ids: np.ndarray  # (n,)
    ids: np.ndarray  # (n, H + 1, k)
    scores: np.ndarray  # (n, H + 1, k) logits
    cosine: np.ndarray  # (n, H + 1, k) of the normalised state and the token's logit direction
    fraction: np.ndarray  # (n, H + 1, k) of the token's greatest attainable logit
    z: np.ndarray  # (n, H + 1, k) above the same token's logits with the values of random tokens
    percentile: np.ndarray  # (n, H + 1, k)
    norms: np.ndarray  # (n, H + 1) length of the update
    text: list[list[list[str]]]
    bytes: list[list[list[str]]]
    num_random: int
    seed: int
    legacy: bool
    notes: list[str]

    def to_frame(self) -> pd.DataFrame:
        """One row per word, head (or `sum`) and rank."""
        return _frame(self, [*range(self.ids.shape[1] - 1), "sum"])


def probe_keys(
    model: Model,
    layer: int,
    words: Sequence[str | int] | None = None,
    *,
    k: int = 5,
    how: How = "auto",
    position: int = 0,
    corpus: Tensor | None = None,
    tokens: Representation | None = None,
    offset: float = 0.0,
    num_random: int = 200,
    seed: int = 0,
    legacy: bool = False,
    tokenizer: Any = None,
) -> KeyProbe:
    """The keys that a word's query scores highest, per head: scale (n_w Ŵ_Q + b̂_Q) R(Δ) Ŵ_Kᵀ · n_t.

    Args:
        words: see `select_words`; default 100 common nouns.
        how, position, corpus: what stands for a token, see `represent`.
        tokens: what `represent` made for this layer, instead of these three.
        offset: Δ of rotary positions.
        num_random: query tokens of the baseline.
        legacy: raw embeddings in every block, bare words, and no b_Q.
    """
    own = heads(model, layer, legacy=legacy)
    source = model.tokenizer if tokenizer is None else tokenizer
    chosen = _words(source, words, k=k, num_random=num_random, legacy=legacy)
    if tokens is None:
        way: How = "raw" if legacy and how == "auto" else how
        tokens = represent(model, layer, how=way, position=position, corpus=corpus, tokenizer=source)
    probe = _probe(layer, chosen, tokens, names_of(source), num_random, seed, legacy)
    rows = probe.tokens.reads(folded=own[0].folded)
    searches = [_key_search(circuit, rows, probe, offset, bias=not legacy) for circuit in own]
    found = []
    for (keys, v, random), at in zip(searches, _nearest(searches, k), strict=True):
        found.append((at, *measures(v, at, keys), *_above(v, random, at, keys)))
    return KeyProbe(**_fields(found, rows, probe), notes=[*probe.notes, *_notes(own)])


def probe_values(
    model: Model,
    layer: int,
    words: Sequence[str | int] | None = None,
    *,
    k: int = 5,
    how: How = "auto",
    position: int = 0,
    corpus: Tensor | None = None,
    tokens: Representation | None = None,
    num_random: int = 200,
    seed: int = 0,
    legacy: bool = False,
    tokenizer: Any = None,
) -> ValueProbe:
    """The tokens that the logit lens reads once a word's own value is added to it, per head and layer.

    A head's state is x_w + n_w Ŵ_V W_O + b̂_V W_O, the layer's is x_w plus all heads and b_O, which is what
    attention does to a sequence of that word alone.

    Args:
        legacy: raw embeddings in every block, bare words, b_O with every head, lengths cut to whole numbers.
        words, how, position, corpus, tokens, num_random: as in `probe_keys`.
    """
    own = heads(model, layer, legacy=legacy)
    source = model.tokenizer if tokenizer is None else tokenizer
    chosen = _words(source, words, k=k, num_random=num_random, legacy=legacy)
    if tokens is None:
        way: How = "raw" if legacy and how == "auto" else how
        tokens = represent(model, layer, how=way, position=position, corpus=corpus, tokenizer=source)
    probe = _probe(layer, chosen, tokens, names_of(source), num_random, seed, legacy)
    lens = logit_lens(model, layer, tokenizer=probe.names)
    rows = probe.tokens.reads(folded=own[0].folded)
    updates, states = _written(model, own, rows, probe, probe.at, legacy)
    _, others = _written(model, own, rows, probe, probe.random, legacy)
    searches = [
        (lens.tokens, lens.read(states[:, i]), lens.read(others[:, i])) for i in range(states.shape[1])
    ]
    found = []
    for (keys, v, random), at in zip(searches, _nearest(searches, k), strict=True):
        found.append((at, *measures(v, at, keys), *_above(v, random, at, keys)))
    norms = updates.norm(dim=-1)
    norms = (norms.trunc() if legacy else norms).numpy()
    notes = [*probe.notes, *lens.notes, *_notes(own)]
    return ValueProbe(**_fields(found, lens.tokens, probe), norms=norms, notes=notes)


@dataclass(frozen=True, eq=False)
class _Probe:
    """What both probes begin with: tokens as the block meets them, the words and random tokens among them."""

    layer: int
    words: Words
    tokens: Representation
    at: Tensor  # (n,) the words' positions in tokens.ids
    random: Tensor  # (R,)
    names: TokenNames
    seed: int
    legacy: bool
    notes: list[str]


def _words(
    tokenizer: Any, words: Sequence[str | int] | None, *, k: int, num_random: int, legacy: bool
) -> Words:
    """The words, once the numbers are found to be possible."""
    if k < 1 or num_random < 2:
        raise UsageError(f"expected k of at least 1 and num_random of at least 2, got {k} and {num_random}")
    return select_words(tokenizer, words, legacy=legacy)


def _probe(
    layer: int,
    words: Words,
    tokens: Representation,
    names: TokenNames,
    num_random: int,
    seed: int,
    legacy: bool,
) -> _Probe:
    at = tokens.positions(words.ids)
    notes = [words.note, tokens.note]
    if bool((at < 0).any()):
        notes.append(f"{int((at < 0).sum())} words are left out: they have no representation")
        words = _kept(words, (at >= 0).numpy())
        at = at[at >= 0]
    if not len(at):
        raise UsageError(
            "expected words that have a representation, none has", hint="a larger corpus, or how='run'"
        )
    random = torch.randint(0, len(tokens.ids), (num_random,), generator=generator(seed))
    notes.append(f"z and percentile are against {num_random} random tokens in the word's place")
    return _Probe(layer, words, tokens, at, random, names, seed, legacy, notes)


def _kept(words: Words, kept: np.ndarray) -> Words:
    own = [word for word, keep in zip(words.words, kept, strict=True) if keep]
    gone = [word for word, keep in zip(words.words, kept, strict=True) if not keep]
    return Words(own, words.ids[kept], [*words.dropped, *gone], words.form, words.note)


def _key_search(
    circuit: Circuit, rows: Reference, probe: _Probe, offset: float, *, bias: bool
) -> tuple[Reference, Tensor, Tensor]:
    """What keys are, and the directions that words and random tokens look for among them.

    With a norm on queries and keys, the search is among the normed keys of the head, h wide.
    """
    query, random = rows.rows(probe.at), rows.rows(probe.random)
    if circuit.k_gain is None:
        v, w = (circuit.key_direction(n, offset=offset, bias=bias) for n in (query, random))
        return rows, v, w
    parts = [circuit.keys(rows.rows(slice(i, i + 4096))) for i in range(0, len(rows), 4096)]
    keys = rows_reference(torch.cat(parts), ids=rows.ids, words=f"normed keys, {rows.words}")
    v, w = (circuit.queries(n, offset=offset, bias=bias) for n in (query, random))
    return keys, circuit.scale * v, circuit.scale * w


def _nearest(searches: list[tuple[Reference, Tensor, Tensor]], k: int) -> list[Tensor]:
    """The best rows (n, k) of every search; one go over the vocabulary where all have the same rows."""
    rows = searches[0][0]
    if all(keys is rows for keys, _, _ in searches):
        at, _ = top_rows(torch.cat([v for _, v, _ in searches]), rows, k=k)
        return list(at.split([len(v) for _, v, _ in searches]))
    return [top_rows(v, keys, k=k)[0] for keys, v, _ in searches]


def _written(
    model: Model, own: list[Circuit], rows: Reference, probe: _Probe, at: Tensor, legacy: bool
) -> tuple[Tensor, Tensor]:
    """Updates of every head and their sum, and the states they lead to: (c, H + 1, d) each."""
    n, x, b_O = rows.rows(at), probe.tokens.states(at), own[0].b_O
    each = torch.stack([circuit.values(n) for circuit in own], dim=1)
    total = each.sum(1, keepdim=True)
    updates = torch.cat([each, total], dim=1)
    if legacy:
        return updates, x[:, None] + updates + b_O
    updates[:, -1] += b_O
    updates = behind_attention(model, probe.layer, updates)
    return updates, x[:, None] + updates


def _above(v: Tensor, random: Tensor, at: Tensor, source: Reference) -> tuple[Tensor, Tensor]:
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


def _fields(found: list[tuple[Tensor, ...]], source: Reference, probe: _Probe) -> dict[str, Any]:
    """The fields that both results share; axis 1 is the heads."""
    at, *numbers = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
    ids = source.ids[at]
    called = {i: (probe.names.text(i), probe.names.hex(i)) for i in ids.unique().tolist()}
    nested = ids.tolist()
    arrays = zip(("scores", "cosine", "fraction", "z", "percentile"), numbers, strict=True)
    return {
        "layer": probe.layer,
        "words": probe.words.words,
        "word_ids": probe.words.ids,
        "ids": ids.numpy(),
        **{name: x.numpy() for name, x in arrays},
        "text": [[[called[i][0] for i in side] for side in row] for row in nested],
        "bytes": [[[called[i][1] for i in side] for side in row] for row in nested],
        "num_random": len(probe.random),
        "seed": probe.seed,
        "legacy": probe.legacy,
    }


def _notes(own: list[Circuit]) -> list[str]:
    return [note for note in own[0].note.split("; ") if note]


def _frame(probe: KeyProbe | ValueProbe, heads: list[Any]) -> pd.DataFrame:
    import pandas as pd

    rows = []
    n, num_heads, k = probe.ids.shape
    for w, h, r in np.ndindex(n, num_heads, k):
        row = {"word": probe.words[w], "head": heads[h], "rank": r + 1, "id": int(probe.ids[w, h, r])}
        row |= {"text": probe.text[w][h][r], "bytes": probe.bytes[w][h][r]}
        for name in ("scores", "cosine", "fraction", "z", "percentile"):
            row[name.removesuffix("s")] = float(getattr(probe, name)[w, h, r])
        if isinstance(probe, ValueProbe):
            row["norm"] = float(probe.norms[w, h])
        rows.append(row)
    return pd.DataFrame(rows)
