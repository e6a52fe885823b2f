"""Words as probes of attention heads: the keys their queries match, and the tokens their values write.

The words are common nouns or any list. For each head, the study lists the keys with the highest scores for a
word's query, and the tokens that the logit lens reads after the head adds the word's value. Random tokens
give the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.data.corpora import read_source
from curvescope.geometry.probes import KeyProbe, ValueProbe, probe_keys, probe_values
from curvescope.geometry.vocabulary.representations import Representation, represent
from curvescope.geometry.vocabulary.words import select_words
from curvescope.models.model import Model
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Shown
from curvescope.studies import traveling_words
from curvescope.studies.problem_config import TokenModel, choose_layers, load_token_model
from curvescope.viz.writers import write_all


@dataclass(frozen=True)
class Config(TokenModel):
    """Settings of the study. The defaults take a few seconds on a CPU."""

    layers: tuple[int, ...] = setting(
        (), "layers to probe; by default all of a small model, else the first, middle and last"
    )
    words: str | None = setting(None, "file with one word per line; by default 100 common nouns")
    k: int = setting(5, "number of tokens to list", least=1)
    representation: Literal["auto", "raw", "position", "run", "mean"] = setting(
        "auto", "representation of a token at the input of a block"
    )
    position: int = setting(0, "position used by representation=position")
    offset: float = setting(0.0, "query position minus key position, for rotary embeddings")
    data: str = setting("sample", "text used by representation=mean")
    tokens: int = setting(4096, "tokens read from that text", least=1)
    num_random: int = setting(200, "random tokens in the baseline", least=2)
    legacy: bool = setting(
        False, "use the settings of the original code: no b_Q, raw embeddings, bare words, integer lengths"
    )


@dataclass(frozen=True)
class Probes(Shown):
    """Key and value probes of every chosen layer."""

    model: str
    keys: list[KeyProbe]
    values: list[ValueProbe]
    legacy: bool

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        z = {(p.layer, h): float(np.median(p.z[:, h, 0])) for p in self.keys for h in range(p.z.shape[1])}
        (layer, head), best = max(z.items(), key=lambda item: item[1])
        rows = [
            ("words", str(len(self.keys[0].words)), self.keys[0].notes[0]),
            (
                "keys",
                f"{best:.1f}σ",
                "median over the words of the score of their nearest key, above random queries, in "
                f"L{layer}.h{head}: the highest of all heads",
            ),
        ]
        for p in self.values:
            note = (
                f"of the words are among the first {p.ids.shape[-1]} tokens of the logit lens after the "
                "heads of the layer wrote their values"
            )
            rows.append((f"L{p.layer} keeps", f"{share_kept(p):.0%}", note))
        return rows + [("note", "", note) for note in self.keys[0].notes[1:2]]

    def opening(self) -> str:
        """State the main result in one or two sentences."""
        z = {(p.layer, h): float(np.median(p.z[:, h, 0])) for p in self.keys for h in range(p.z.shape[1])}
        layer, head = max(z, key=z.__getitem__)
        strongest = (
            f"The clearest match between words and keys is in L{layer}.h{head}: the median word's best "
            f"key scores {z[layer, head]:.1f} standard deviations above random queries"
        )
        kept = {p.layer: share_kept(p) for p in self.values}
        if not kept:
            return f"{strongest}."
        keeps, loses = max(kept, key=kept.__getitem__), min(kept, key=kept.__getitem__)
        also = f", and L{loses} keeps the fewest ({kept[loses]:.0%})" if loses != keeps else ""
        return (
            f"{strongest}. After its heads wrote, L{keeps} keeps {kept[keeps]:.0%} of the words among the "
            f"first tokens{also}."
        )

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        bare = "without the bias of the query" if self.legacy else "including the bias of the query"
        return {
            "keys": f"Scores of the word's query with the keys of all tokens, {bare}. For each head, the "
            "words whose nearest key is farthest above random queries, in standard deviations (z).",
            "values": "The word's own value, added to its state and read by the logit lens. For each head "
            "and for the sum of all heads, the words whose first token is farthest above the values of "
            "random tokens.",
            "key_strength": "Nearest key of every word, one box per head (quartiles over words): its score "
            "in standard deviations above random queries, and as a fraction of the highest possible "
            "score of any key.",
            "value_strength": "Output of the words' values, one box per head (quartiles over words): length "
            "of the update, and logit of the first token in standard deviations above random tokens.",
        }

    def files(self) -> dict[str, str]:
        """Return every word and rank as CSV, and in legacy mode the original's logs."""
        import pandas as pd

        files = write_all(self.tables(), self.captions())
        for name, probes in (("keys", self.keys), ("values", self.values)):
            frames = [p.to_frame().assign(layer=p.layer) for p in probes]
            files[f"{name}_all.csv"] = pd.concat(frames, ignore_index=True).to_csv(index=False)
        if self.legacy:
            files["common_noun_logs_qk.txt"] = traveling_words.keys_text(self.keys)
            files["common_noun_logs_vo.txt"] = traveling_words.values_text(self.values)
        return files


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Probes:
    """Probe the keys and values of every chosen layer."""
    words = None if cfg.words is None else read_words(cfg.words)
    model = load_token_model(cfg)
    layers = choose_layers(cfg.layers, model)
    form = traveling_words.KEYS["form"] if cfg.legacy else "auto"
    select_words(model.tokenizer, words, form=form)  # raises before the work starts if a word does not fit
    corpus = _corpus(cfg, model) if cfg.representation == "mean" else None
    same: dict[str, Any] = {"k": cfg.k, "num_random": cfg.num_random, "seed": cfg.seed}
    of_keys, of_values = (traveling_words.KEYS, traveling_words.VALUES) if cfg.legacy else ({}, {})
    tokens_at = lru_cache(1)(partial(_tokens, cfg, model, corpus))  # cached, because both probes use it

    def keys(layer: int) -> KeyProbe:
        tokens = tokens_at(layer)
        return probe_keys(model, layer, words, offset=cfg.offset, tokens=tokens, **same, **of_keys)

    def values(layer: int) -> ValueProbe:
        return probe_values(model, layer, words, tokens=tokens_at(layer), **same, **of_values)

    pieces = [
        Piece(f"{what} of L{layer}", partial(work, layer), kind=what)
        for layer in layers
        for what, work in (("keys", keys), ("values", values))
    ]
    contents = fingerprint(model, corpus, repr(words))
    results = work_through(pieces, contents=contents, progress=progress, state=state)
    probed = [results.take(ValueProbe, f"values of L{layer}") for layer in layers]
    return Probes(
        model=model.name,
        keys=[results.take(KeyProbe, f"keys of L{layer}") for layer in layers],
        values=[traveling_words.whole_lengths(p) if cfg.legacy else p for p in probed],
        legacy=cfg.legacy,
    )


def _tokens(cfg: Config, model: Model, corpus: Tensor | None, layer: int) -> Representation:
    """Return the representation of every token at the input of the block."""
    how = (
        traveling_words.REPRESENTATION if cfg.legacy and cfg.representation == "auto" else cfg.representation
    )
    return represent(model, layer, how=how, position=cfg.position, corpus=corpus)


def read_words(path: str | Path) -> list[str]:
    """Read the words of a file, one per line; empty lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(
            f"expected a file with one word per line, could not read {str(path)!r}: {reason}",
            hint="leave out words=… to use the 100 common nouns",
        ) from None
    words = [line.strip() for line in lines if line.strip()]
    if not words:
        raise UsageError(f"expected at least one word in {str(path)!r}, got none")
    return words


def _corpus(cfg: Config, model: Model) -> Tensor:
    """Return windows (N, T) of the text, for the mean state of a token."""
    if model.tokenizer is None:
        raise UsageError(
            f"the model {model.name!r} has no tokenizer, so the text {cfg.data!r} cannot be read"
        )
    ids = model.tokenizer.encode(read_source(cfg.data))[: cfg.tokens]
    length = min(model.n_ctx or 64, 64, len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).reshape(-1, length)


def share_kept(probe: ValueProbe) -> float:
    """Share of the words that are among the listed tokens after all heads wrote their values."""
    return float((probe.ids[:, -1] == probe.word_ids[:, None]).any(1).mean())
