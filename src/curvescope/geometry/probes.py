"""Words as probes of heads: the keys that their queries score highest, and the tokens their values write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.roles import has_lens, norm_kind, norm_of, weight
from curvescope.geometry.sphere import StreamNorm
from curvescope.geometry.vocabulary.decode import measures, rows_at, top_rows
from curvescope.geometry.vocabulary.names import TokenNames, names_of
from curvescope.geometry.vocabulary.references import TokenReference, reference, rows_reference
from curvescope.geometry.vocabulary.representations import How, Representation, represent
from curvescope.geometry.vocabulary.words import Form, Words, select_words
from curvescope.models.model import Model

if TYPE_CHECKING:
    import pandas as pd

Search = tuple[TokenReference, Tensor, Tensor]
"""Rows to search, directions of the words (n, d), directions of random tokens (R, d)."""
NUMBERS = ("scores", "cosine", "fraction", "z", "percentile")


@dataclass(frozen=True, eq=False)
class Probing:
    """Inputs of a probe: the heads, the tokens as the block sees them, and the words and random tokens."""

    layer: int
    circuits: list[Circuit]
    words: Words
    tokens: Representation
    positions: Tensor  # (n,) indices of the words in tokens.ids
    random: Tensor  # (R,)
    names: TokenNames
    seed: int
    notes: list[str]

    @property
    def rows(self) -> TokenReference:
        """Rows that attention reads for every token, in the form its heads expect."""
        return self.tokens.reads(folded=self.circuits[0].folded)

    @property
    def head_notes(self) -> list[str]:
        """Notes on what the matrices of the heads leave out."""
        return [note for note in self.circuits[0].note.split("; ") if note]


def prepare(
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
    circuits = heads(model, layer, folded=folded)
    source = model.tokenizer if tokenizer is None else tokenizer
    if k < 1 or num_random < 2:
        raise UsageError(f"expected k of at least 1 and num_random of at least 2, got {k} and {num_random}")
    selected = select_words(source, words, form=form)
    if tokens is None:
        tokens = represent(model, layer, how=how, position=position, corpus=corpus, tokenizer=source)
    positions = tokens.positions(selected.ids)
    notes = [selected.note, tokens.note]
    if bool((positions < 0).any()):
        notes.append(f"{int((positions < 0).sum())} words are left out: they have no representation")
        selected, positions = _drop_missing(selected, (positions >= 0).numpy()), positions[positions >= 0]
    if not len(positions):
        raise UsageError(
            "expected words that have a representation, got none", hint="use a larger corpus, or how='run'"
        )
    random = torch.randint(0, len(tokens.ids), (num_random,), generator=generator(seed))
    notes.append(f"z and percentile compare the word with {num_random} random tokens")
    return Probing(layer, circuits, selected, tokens, positions, random, names_of(source), seed, notes)


def _drop_missing(words: Words, has_representation: np.ndarray) -> Words:
    represented = [word for word, keep in zip(words.words, has_representation, strict=True) if keep]
    missing = [word for word, keep in zip(words.words, has_representation, strict=True) if not keep]
    return Words(
        represented, words.ids[has_representation], [*words.dropped, *missing], words.form, words.note
    )


def _nearest(searches: list[Search], k: int) -> list[Tensor]:
    """Return the best rows (n, k) of every search, in one pass if all share their rows."""
    rows = searches[0][0]
    if all(keys is rows for keys, _, _ in searches):
        best, _ = top_rows(torch.cat([v for _, v, _ in searches]), rows, k=k)
        return list(best.split([len(v) for _, v, _ in searches]))
    return [top_rows(v, keys, k=k)[0] for keys, v, _ in searches]


def compare_with_random(
    v: Tensor, random: Tensor, at: Tensor, source: TokenReference
) -> tuple[Tensor, Tensor]:
    """Compare the scores at `at` (n, k) with those of random directions: z and percentile.

    Scores that agree to nine digits count by half in the percentile, because the word itself may be drawn.
    """
    z, percentile = (torch.empty(at.shape, dtype=torch.float64) for _ in range(2))
    for part, rows in rows_at(at, source):
        word_scores, random_scores = (
            (rows * v[part, None]).sum(-1),
            rows @ random.T,
        )  # the bias of a row cancels
        std = random_scores.std(-1, keepdim=True)
        std = torch.where(std > 0, std, torch.full_like(std, torch.nan))
        deviation = (
            word_scores[..., None] - random_scores
        ) / std  # in standard deviations above each random score
        z[part] = deviation.mean(-1)
        compare_with_random, equal = deviation > 1e-9, deviation.abs() <= 1e-9
        percentile[part] = 100 * (compare_with_random.double() + 0.5 * equal.double()).mean(-1)
    return z, percentile


def result_fields(searches: list[Search], source: TokenReference, probing: Probing, k: int) -> dict[str, Any]:
    """Return the fields that both results share, from one search per head (axis 1)."""
    parts = []
    for (keys, v, random), at in zip(searches, _nearest(searches, k), strict=True):
        parts.append((at, *measures(v, at, keys), *compare_with_random(v, random, at, keys)))
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
    """Return one row per word, head and rank of a probe; `heads` are the names of axis 1."""
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


@dataclass(frozen=True)
class KeyProbe(Result):
    """Nearest keys of every word and head: axes (words, heads, k)."""

    layer: int
    words: list[str]
    word_ids: np.ndarray  # (n,)
    ids: np.ndarray  # (n, H, k)
    scores: np.ndarray  # (n, H, k) attention scores, without terms that do not depend on the key
    cosine: np.ndarray  # (n, H, k)
    fraction: np.ndarray  # (n, H, k) fraction of the greatest score that any key could have
    z: np.ndarray  # (n, H, k) standard deviations above the same key's scores with random query tokens
    percentile: np.ndarray  # (n, H, k) among these random scores, 0 to 100
    text: list[list[list[str]]]
    bytes: list[list[list[str]]]
    num_random: int
    seed: int
    notes: list[str]  # representation of tokens, number of words, …
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
    """Find the keys that a word's query scores highest, per head: scale (n_w Ŵ_Q + b̂_Q) R(Δ) Ŵ_Kᵀ · n_t.

    Args:
        words: see `select_words`; default 100 common nouns.
        how: representation of a token, with `position` and `corpus`: see `represent`.
        tokens: result of `represent` for this layer, instead of `how`, `position` and `corpus`.
        offset: Δ of rotary positions.
        num_random: number of random query tokens in the baseline.
        folded: fold the norm into the matrices, see `heads`; else they act on γ ∘ n + β.
        bias: False omits b_Q.
        form: words with or without a space before them, see `select_words`.
    """
    probing = prepare(
        model, layer, words, tokens=tokens, k=k, num_random=num_random, seed=seed, folded=folded,
        form=form, tokenizer=tokenizer, how=how, position=position, corpus=corpus,
    )  # fmt: skip
    rows = probing.rows
    searches = [_search(circuit, rows, probing, offset, bias=bias) for circuit in probing.circuits]
    left_out = [] if bias else ["the bias of queries is left out"]
    notes = [*probing.notes, *left_out, *probing.head_notes]
    return KeyProbe(**result_fields(searches, rows, probing, k), notes=notes)


def _search(circuit: Circuit, rows: TokenReference, probing: Probing, offset: float, *, bias: bool) -> Search:
    """Search the keys for the directions of words and random tokens.

    With a norm on queries and keys, the search is among the normed keys of the head, h wide.
    """
    query, random = rows.rows(probing.positions), rows.rows(probing.random)
    if circuit.k_gain is None:
        v, w = (circuit.key_direction(n, offset=offset, bias=bias) for n in (query, random))
        return rows, v, w
    parts = [circuit.keys(rows.rows(slice(i, i + 4096))) for i in range(0, len(rows), 4096)]
    keys = rows_reference(torch.cat(parts), ids=rows.ids, words=f"normed keys, {rows.words}")
    v, w = (circuit.queries(n, offset=offset, bias=bias) for n in (query, random))
    return keys, circuit.scale * v, circuit.scale * w


@dataclass(frozen=True, eq=False)
class LogitLens:
    """Norm and rows of tokens: the logit of t at a state x is `read(x)` · row t + bias t."""

    norm: StreamNorm
    sphere: bool  # True if γ is in the rows, so that states are only normalized
    tokens: TokenReference
    notes: tuple[str, ...] = ()

    def read(self, x: Tensor) -> Tensor:
        """Return states (…, d) normalized as the rows require."""
        return self.norm.sphere(x) if self.sphere else self.norm(x)


def logit_lens(model: Model, layer: int, *, tokenizer: Any = None) -> LogitLens:
    """Return the logit lens of a model at the middle of a block.

    Pre-norm: the final norm, and P(γ_f ∘ u_t) with the biases. Post-norm: the norm after the block's
    attention, and u_t itself. The lens omits the hidden layer in the head of masked language models.
    """
    tokens = reference(model, "logit", bias=True, tokenizer=tokenizer)
    notes = []
    if weight(model, "U") is None and model.facts.get("task", "causal-lm") == "features":
        notes.append("no unembedding: states are compared with the input embedding")
    if "W_mlm" in model.blocks:
        notes.append("the lens omits the hidden layer of the head")
    if has_lens(model):
        return LogitLens(norm_of(model, "ln_f"), True, tokens, tuple(notes))
    if norm_kind(model) != "none" and model.facts.get("norm") == "post":
        notes.append(f"post-norm: states are read after L{layer}.ln1")
        return LogitLens(norm_of(model, f"L{layer}.ln1"), False, tokens, tuple(notes))
    return LogitLens(StreamNorm("none"), False, tokens, tuple(notes))


def after_attention_norm(model: Model, layer: int, updates: Tensor) -> Tensor:
    """Return the updates (c, H + 1, d), the last one their sum, as attention adds them to the stream.

    If a norm follows attention (Gemma 2 and 3), every head is scaled like the sum, so that they still add up.
    Otherwise the updates are returned unchanged.
    """
    if f"L{layer}.ln1_post.g" not in model.blocks:
        return updates
    norm = norm_of(model, f"L{layer}.ln1_post")
    total = updates[:, -1:]
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + norm.eps)
    return updates * scale * (1.0 if norm.gamma is None else norm.gamma)


OutputBias = Literal["sum", "every"]


@dataclass(frozen=True)
class ValueProbe(Result):
    """Tokens that every word's value writes, by the logit lens: heads 0 … H − 1, then their sum (axis 1)."""

    layer: int
    words: list[str]
    word_ids: np.ndarray  # (n,)
    ids: np.ndarray  # (n, H + 1, k)
    scores: np.ndarray  # (n, H + 1, k) logits
    cosine: np.ndarray  # (n, H + 1, k) between the normalized state and the token's logit direction
    fraction: np.ndarray  # (n, H + 1, k) fraction of the token's greatest attainable logit
    z: np.ndarray  # (n, H + 1, k) standard deviations above the same token's logits with random tokens
    percentile: np.ndarray  # (n, H + 1, k)
    norms: np.ndarray  # (n, H + 1) length of the update
    text: list[list[list[str]]]
    bytes: list[list[list[str]]]
    num_random: int
    seed: int
    notes: list[str]
    legacy: InitVar[object] = None  # of saved results, which may have it; says nothing

    def to_frame(self) -> pd.DataFrame:
        """One row per word, head (or `sum`) and rank."""
        rows = frame(self, [*range(self.ids.shape[1] - 1), "sum"])
        return rows.assign(norm=np.repeat(self.norms.reshape(-1), self.ids.shape[2]))


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
    folded: bool = True,
    output_bias: OutputBias = "sum",
    form: Form = "auto",
    tokenizer: Any = None,
) -> ValueProbe:
    """Find the tokens that the logit lens reads after a word's own value is added to it, per head and layer.

    A head's state is x_w + n_w Ŵ_V W_O + b̂_V W_O. The layer's state is x_w plus all heads and b_O, which
    attention computes for a sequence of that word alone. The other arguments are those of `probe_keys`.

    Args:
        output_bias: `sum` adds b_O to the layer's update. `every` adds it to the state of each head and of
            their sum, but to no update, and skips a norm after attention.
    """
    if output_bias not in ("sum", "every"):
        raise UsageError(f"output_bias: expected sum or every, got {output_bias!r}")
    probing = prepare(
        model, layer, words, tokens=tokens, k=k, num_random=num_random, seed=seed, folded=folded,
        form=form, tokenizer=tokenizer, how=how, position=position, corpus=corpus,
    )  # fmt: skip
    lens = logit_lens(model, layer, tokenizer=probing.names)
    rows = probing.rows
    updates, states = _written_states(model, rows, probing, probing.positions, output_bias)
    _, random_states = _written_states(model, rows, probing, probing.random, output_bias)
    searches = [
        (lens.tokens, lens.read(states[:, i]), lens.read(random_states[:, i])) for i in range(states.shape[1])
    ]
    bias_notes = ["b_O is added to the state of every head"] if output_bias == "every" else []
    return ValueProbe(
        **result_fields(searches, lens.tokens, probing, k),
        norms=updates.norm(dim=-1).numpy(),
        notes=[*probing.notes, *lens.notes, *bias_notes, *probing.head_notes],
    )


def _written_states(
    model: Model, rows: TokenReference, probing: Probing, at: Tensor, output_bias: OutputBias
) -> tuple[Tensor, Tensor]:
    """Return the updates of every head and their sum, and the resulting states: (c, H + 1, d) each."""
    n, x, b_O = rows.rows(at), probing.tokens.states(at), probing.circuits[0].b_O
    head_updates = torch.stack([circuit.values(n) for circuit in probing.circuits], dim=1)
    total = head_updates.sum(1, keepdim=True)
    updates = torch.cat([head_updates, total], dim=1)
    if output_bias == "every":
        return updates, x[:, None] + updates + b_O
    updates[:, -1] += b_O
    updates = after_attention_norm(model, probing.layer, updates)
    return updates, x[:, None] + updates
