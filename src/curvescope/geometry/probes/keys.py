"""Which keys the query of a word looks for, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.probes.common import Probing, Search, begin, found_by, frame
from curvescope.geometry.vocabulary.references import Reference, rows_reference
from curvescope.geometry.vocabulary.representations import How, Representation
from curvescope.geometry.vocabulary.words import Form
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
    notes: list[str]  # how tokens are represented, how many words were kept, …
    legacy: InitVar[object] = None  # of saved results, which may have it; says nothing

    def to_frame(self) -> pd.DataFrame:
        """One row per word, head and rank."""
        return frame(self, list(range(self.ids.shape[1])))


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
    folded: bool = True,
    bias: bool = True,
    form: Form = "auto",
    tokenizer: Any = None,
) -> KeyProbe:
    """The keys that a word's query scores highest, per head: scale (n_w Ŵ_Q + b̂_Q) R(Δ) Ŵ_Kᵀ · n_t.

    Args:
        words: see `select_words`; default 100 common nouns.
        how: what stands for a token, with `position` and `corpus`: see `represent`.
        tokens: what `represent` made for this layer, instead of these three.
        offset: Δ of rotary positions.
        num_random: query tokens of the baseline.
        folded: with the norm in the matrices, see `heads`; without, they meet γ ∘ n + β.
        bias: False leaves b_Q out.
        form: words with or without a space before them, see `select_words`.
    """
    probing = begin(
        model, layer, words, tokens=tokens, k=k, num_random=num_random, seed=seed, folded=folded,
        form=form, tokenizer=tokenizer, how=how, position=position, corpus=corpus,
    )  # fmt: skip
    rows = probing.rows
    searches = [_search(circuit, rows, probing, offset, bias=bias) for circuit in probing.own]
    left_out = [] if bias else ["the bias of queries is left out"]
    notes = [*probing.notes, *left_out, *probing.head_notes]
    return KeyProbe(**found_by(searches, rows, probing, k), notes=notes)


def _search(circuit: Circuit, rows: Reference, probing: Probing, offset: float, *, bias: bool) -> Search:
    """What keys are, and the directions that words and random tokens look for among them.

    With a norm on queries and keys, the search is among the normed keys of the head, h wide.
    """
    query, random = rows.rows(probing.at), rows.rows(probing.random)
    if circuit.k_gain is None:
        v, w = (circuit.key_direction(n, offset=offset, bias=bias) for n in (query, random))
        return rows, v, w
    parts = [circuit.keys(rows.rows(slice(i, i + 4096))) for i in range(0, len(rows), 4096)]
    keys = rows_reference(torch.cat(parts), ids=rows.ids, words=f"normed keys, {rows.words}")
    v, w = (circuit.queries(n, offset=offset, bias=bias) for n in (query, random))
    return keys, circuit.scale * v, circuit.scale * w
