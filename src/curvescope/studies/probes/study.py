"""Words as probes of heads: which keys a word's query looks for, and what its value writes.

For common nouns, or any list of words: per head the nearest keys, and the tokens that the logit lens reads
once the head has written the word's value; with random tokens in the words' place beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.data.corpora import read_source
from curvescope.geometry.probes import KeyProbe, ValueProbe, probe_keys, probe_values
from curvescope.geometry.vocabulary.representations import Representation, represent
from curvescope.geometry.vocabulary.words import select_words
from curvescope.models.model import Model
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies import traveling_words
from curvescope.studies.setting import TokenModel, choose_layers, load_token_model
from curvescope.viz.writers import write_all

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Config(TokenModel):
    """What to probe with. The defaults take a few seconds on a CPU."""

    layers: tuple[int, ...] = setting(
        (), "which; by default all of a small model, else the first, middle and last"
    )
    words: str | None = setting(None, "a file with a word per line; by default 100 common nouns")
    k: int = setting(5, "tokens listed")
    representation: Literal["auto", "raw", "position", "run", "mean"] = setting(
        "auto", "of a token where it enters a block"
    )
    position: int = setting(0, "for representation=position")
    offset: float = setting(0.0, "query's position less the key's, for rotary positions")
    data: str = setting("sample", "the text of representation=mean")
    tokens: int = setting(4096, "of that text")
    num_random: int = setting(200, "random tokens to compare with")
    legacy: bool = setting(False, "the original's choices: no b_Q, raw embeddings, bare words, whole lengths")

    def __post_init__(self) -> None:
        as_tuples(self, "layers")
        super().__post_init__()
        at_least(self, 1, "k", "tokens")
        at_least(self, 2, "num_random")


@dataclass(frozen=True)
class Probes(Shown):
    """Both probes of every chosen layer."""

    model: str
    keys: list[KeyProbe]
    values: list[ValueProbe]
    legacy: bool

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        z = {(p.layer, h): float(np.median(p.z[:, h, 0])) for p in self.keys for h in range(p.z.shape[1])}
        (layer, head), best = max(z.items(), key=lambda item: item[1])
        rows = [
            ("words", str(len(self.keys[0].words)), self.keys[0].notes[0]),
            (
                "keys",
                f"{best:.1f}σ",
                f"of the words' nearest key above random queries in L{layer}.h{head}, the most",
            ),
        ]
        for p in self.values:
            note = f"of the words are among the first {p.ids.shape[-1]} tokens read once its heads wrote"
            rows.append((f"L{p.layer} keeps", f"{share_kept(p):.0%}", note))
        return rows + [("note", "", note) for note in self.keys[0].notes[1:2]]

    def opening(self) -> str:
        """What these numbers say."""
        z = {(p.layer, h): float(np.median(p.z[:, h, 0])) for p in self.keys for h in range(p.z.shape[1])}
        layer, head = max(z, key=z.__getitem__)
        said = (
            f"Words find a key most surely in L{layer}.h{head}: that of the median word is "
            f"{z[layer, head]:.1f} standard deviations above those of random queries"
        )
        kept = {p.layer: share_kept(p) for p in self.values}
        if not kept:
            return f"{said}."
        keeps, loses = max(kept, key=kept.__getitem__), min(kept, key=kept.__getitem__)
        also = f", and L{loses} the fewest ({kept[loses]:.0%})" if loses != keeps else ""
        return f"{said}. L{keeps} still says {kept[keeps]:.0%} of the words after its heads wrote{also}."

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        bare = "without the bias of the query" if self.legacy else "the bias of the query included"
        return {
            "keys": f"The word's query against the keys of all tokens, {bare}: for each head the words whose "
            "nearest key is farthest above random queries, in standard deviations (z).",
            "values": "The word's own value added to it, read by the logit lens: for each head, and for the "
            "sum of all heads, the words whose first token is farthest above values of random tokens.",
            "key_strength": "Nearest key of every word, one box per head (quartiles over words): standard "
            "deviations above random queries, and the fraction of the greatest score of any key.",
            "value_strength": "What the words' values write, one box per head (quartiles over words): the "
            "length of the update, and the first token's logit, in standard deviations above random.",
        }

    def files(self) -> dict[str, str]:
        """The tables in other formats, every word and rank as CSV, and in legacy mode the original's logs."""
        import pandas as pd

        found = write_all(self.tables(), self.captions())
        for name, probes in (("keys", self.keys), ("values", self.values)):
            frames = [p.to_frame().assign(layer=p.layer) for p in probes]
            found[f"{name}_all.csv"] = pd.concat(frames, ignore_index=True).to_csv(index=False)
        if self.legacy:
            found["common_noun_logs_qk.txt"] = traveling_words.keys_text(self.keys)
            found["common_noun_logs_vo.txt"] = traveling_words.values_text(self.values)
        return found


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Probes:
    """Probe the keys and values of every chosen layer.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    words = None if cfg.words is None else read_words(cfg.words)
    model = load_token_model(cfg)
    layers = choose_layers(cfg.layers, model)
    form = traveling_words.KEYS["form"] if cfg.legacy else "auto"
    select_words(model.tokenizer, words, form=form)  # words that do not fit are found before the work
    corpus = _corpus(cfg, model) if cfg.representation == "mean" else None
    same: dict[str, Any] = {"k": cfg.k, "num_random": cfg.num_random, "seed": cfg.seed}
    of_keys, of_values = (traveling_words.KEYS, traveling_words.VALUES) if cfg.legacy else ({}, {})
    tokens_at = lru_cache(1)(partial(_tokens, cfg, model, corpus))  # the same for both probes

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
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    probed = [found.take(ValueProbe, f"values of L{layer}") for layer in layers]
    return Probes(
        model=model.name,
        keys=[found.take(KeyProbe, f"keys of L{layer}") for layer in layers],
        values=[traveling_words.whole_lengths(p) if cfg.legacy else p for p in probed],
        legacy=cfg.legacy,
    )


def _tokens(cfg: Config, model: Model, corpus: Tensor | None, layer: int) -> Representation:
    """Every token as the block meets it."""
    how = (
        traveling_words.REPRESENTATION if cfg.legacy and cfg.representation == "auto" else cfg.representation
    )
    return represent(model, layer, how=how, position=cfg.position, corpus=corpus)


def read_words(path: str | Path) -> list[str]:
    """The words of a file, one per line; empty lines do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UsageError(
            f"expected a file with a word per line, could not read {str(path)!r}: {reason}",
            hint="without words=… the 100 common nouns are used",
        ) from None
    words = [line.strip() for line in lines if line.strip()]
    if not words:
        raise UsageError(f"expected at least one word in {str(path)!r}, it has none")
    return words


def _corpus(cfg: Config, model: Model) -> Tensor:
    """Windows (N, T) of the text, for the mean state of a token."""
    if model.tokenizer is None:
        raise UsageError(
            f"the model {model.name!r} has no tokenizer, so it cannot read the text {cfg.data!r}"
        )
    ids = model.tokenizer.encode(read_source(cfg.data))[: cfg.tokens]
    length = min(model.n_ctx or 64, 64, len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).reshape(-1, length)


def share_kept(probe: ValueProbe) -> float:
    """Share of the words that are among the tokens read once all heads have written their values."""
    return float((probe.ids[:, -1] == probe.word_ids[:, None]).any(1).mean())
