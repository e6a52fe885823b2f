"""Heads of a model as matrices: tokens that queries match and values write, and composition.

The study computes W_QK and W_VO of every head with the norm folded in, their singular values, the tokens at
both ends of their singular vectors, the bias of the keys, copying scores, and composition scores compared
with chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from curvescope.core.config import setting
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.data.batches import Batches
from curvescope.geometry.attention.composition import Composition, Kind, composition
from curvescope.geometry.attention.directions import HeadDirections, decode_heads
from curvescope.geometry.attention.energy import Energy, activation_energy
from curvescope.geometry.attention.heads import heads
from curvescope.models.model import Model
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Shown
from curvescope.studies import traveling_words
from curvescope.studies.problem_config import (
    FEW_LAYERS,
    TokenModel,
    TokenModelOnData,
    choose_layers,
    load_token_model,
    read_data,
)
from curvescope.viz.writers import label, visible, write_all

KINDS: tuple[Kind, ...] = ("Q", "K", "V")
QUICK_LAYERS = 8  # models with at most this many layers use all of them by default


@dataclass(frozen=True)
class Config(TokenModel):
    """Layers, number of directions and data. The defaults take a few seconds on a CPU."""

    layers: tuple[int, ...] = setting(
        (), "layer indices; default: all of up to eight layers, else first, middle and last"
    )
    k: int = setting(5, "tokens at each end of a direction", least=1)
    num: int | None = setting(None, "singular pairs of each head; default: 3, in legacy mode 20", least=1)
    folded: bool = setting(True, "fold the norm before the heads into their matrices")
    offset: float = setting(0.0, "position of the query minus that of the key, for rotary positions")
    num_samples: int = setting(100, "random samples for the chance level of composition", least=2)
    data: str | None = setting(None, "text or task to measure the energy of the pairs on; default: none")
    tokens: int = setting(1024, "tokens of that text", least=1)
    legacy: bool = setting(False, "choices of the original code: raw matrices, raw decoding, one side")


@dataclass(frozen=True)
class Heads(Shown):
    """Heads of the chosen layers, and their composition."""

    model: str
    layers: list[HeadDirections]
    compositions: list[Composition]  # Q, K, V for every pair of layers
    legacy: bool
    energies: list[Energy]  # energies of the pairs of each layer on the data; empty without data
    data: str | None
    num_layers: int | None = None  # layers of the model; None in older results

    def summary(self) -> list[Line]:
        """Return the key numbers: label, value, explanation."""
        rows = [self._layers_line()]
        for name in ("qk", "vo"):
            ranks = self._ranks(name)
            most = max(int(getattr(layer, f"{name}_spectra").rank.max()) for layer in self.layers)
            note = f"median effective rank over heads, {ranks.min():.1f} to {ranks.max():.1f}, of {most}"
            rows.append((f"{name.upper()} rank", f"{np.median(ranks):.1f}", note))
        copying = {(layer.layer, h): v for layer in self.layers for h, v in enumerate(layer.copying)}
        for words, pick in (("copies most", max), ("negates most", min)):
            (at, head), value = pick(copying.items(), key=lambda item: item[1])
            rows.append((words, f"{value:+.2f}", f"L{at}.h{head}: Re Σλ / Σ|λ| of its value-output matrix"))
        rows.append(self._bias_line())
        if self.compositions:
            best = max(self.compositions, key=lambda c: float(np.nanmax(c.z)))
            i, j = np.unravel_index(int(np.nanargmax(best.z)), best.z.shape)
            note = (
                f"{best.kind}-composition of L{best.layers[0]}.h{i} with L{best.layers[1]}.h{j}: "
                f"{best.z[i, j]:.0f} standard deviations above chance ({best.chance:.3f})"
            )
            rows.append(("composition", f"{best.scores[i, j]:.3f}", note))
        return rows + [("note", "", note) for note in self.layers[0].notes]

    def _layers_line(self) -> Line:
        names = ", ".join(f"L{layer.layer}" for layer in self.layers)
        if self.num_layers is None or len(self.layers) == self.num_layers:
            return ("layers", str(len(self.layers)), f"measured: {names}")
        others = "; others by layers=0,1,…"
        return ("layers", f"{len(self.layers)} of {self.num_layers}", f"measured: {names}{others}")

    def _bias_line(self) -> Line:
        if not self.has_bias:
            return (
                "query bias",
                "none",
                "queries have no bias, so no token is preferred by all of them",
            )
        bias = {(layer.layer, h): v for layer in self.layers for h, v in enumerate(layer.bias_share)}
        (at, head), value = max(bias.items(), key=lambda item: item[1])
        note = (
            f"of the variance of key scores in L{at}.h{head} comes from the query's bias, the largest share"
        )
        return ("query bias", f"{value:.0%}", note)

    @property
    def has_bias(self) -> bool:
        """Return True if the queries of any head have a bias, k₀ ≠ 0."""
        return any(layer.key_bias_size.any() for layer in self.layers)

    def opening(self) -> str:
        """Summarize the result."""
        scores = {(layer.layer, h): float(v) for layer in self.layers for h, v in enumerate(layer.copying)}
        most, least = (pick(scores, key=scores.__getitem__) for pick in (max, min))
        qk, vo = (float(np.median(self._ranks(kind))) for kind in ("qk", "vo"))
        return (
            f"Of {plural(len(scores), 'head')}, L{most[0]}.h{most[1]} has the highest copying score "
            f"({scores[most]:+.2f}; 1 is an exact copy) and L{least[0]}.h{least[1]} the lowest "
            f"({scores[least]:+.2f}; −1 negates). The median effective rank is about {qk:.0f} for W_QK "
            f"and about {vo:.0f} for W_VO."
        )

    def _ranks(self, kind: str) -> np.ndarray:
        """Return effective ranks of all heads, `qk` or `vo`."""
        return np.concatenate([getattr(layer, f"{kind}_spectra").effective_rank for layer in self.layers])

    def captions(self) -> dict[str, str]:
        """Return a caption for each figure and table."""
        first = self.layers[0]
        bias = ", and the share of the variance of key scores that comes from the query's bias"
        how = "with the norm folded in" if first.folded else "of the stored matrices"
        both = "one side, chosen by its largest score" if self.legacy else "both sides, the stronger first"
        of = "Σ s" if self.legacy else "Σ s²"
        pairs = f"Singular pairs {how}: tokens nearest to the left and right vectors, {both}."
        along = f"weighted by the size of the states of {self.data} along "
        energy = f" The share on data is the share of s² {along}"
        qk, vo = (energy + "u, and the spread of keys along v.", energy + "u.") if self.energies else ("", "")
        return {
            "spectra": f"Singular values of W_QK and W_VO of every head, {how}, and the share of {of} in "
            "the first singular values; dots mark 99 %.",
            "scores": "Effective rank exp(entropy of s²/Σ s²) of both matrices, the copying score Re Σλ / "
            f"Σ|λ| of the value-output matrix (1 copies, −1 negates){bias if self.has_bias else ''}.",
            "composition": "How strongly later heads read the output of earlier ones in queries, keys and "
            "values: |M₁ M₂| / (|M₁| |M₂|) in standard deviations above chance (same singular values, "
            "random directions). Gray: not a pair.",
            "heads": "One row per head: largest singular values, effective ranks, number of singular values "
            "for 99 % of Σ s², copying score" + (", |k₀| and the bias's share." if self.has_bias else "."),
            "qk": f"{pairs} Left: direction of the query; right: direction of the key.{qk}",
            "vo": f"{pairs} Left: direction that the head reads; right: direction that it writes, by its "
            f"effect on logits.{vo}",
            "key_bias": "Tokens whose keys every query of a head prefers (+) and avoids (−): k₀ = b̂_Q Ŵ_Kᵀ.",
        }

    def files(self) -> dict[str, str]:
        """Return the tables in other formats; in legacy mode, the logs of the original code."""
        found = write_all(self.tables(), self.captions())
        if self.legacy:
            for name in ("qk", "vo"):
                found[f"svd_{name}_logs.txt"] = traveling_words.svd_text(self.layers, name)
                for layer in self.layers:
                    found[f"svd_{name}_latex_table_layer_{layer.layer}.txt"] = traveling_words.svd_latex(
                        layer, name
                    )
            found["key_query_bias_logs.txt"] = traveling_words.bias_text(self.layers)
        return found


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Heads:
    """Decode the heads of every chosen layer and compare all pairs of these layers."""
    model = load_token_model(cfg)
    layers = choose_layers(cfg.layers, model, few=FEW_LAYERS if cfg.legacy else QUICK_LAYERS)
    num = cfg.num or (traveling_words.NUM_PAIRS if cfg.legacy else 3)
    options: dict[str, Any] = {"k": cfg.k, "num": num, "offset": cfg.offset, "folded": cfg.folded}
    options |= traveling_words.DIRECTIONS if cfg.legacy else {}
    pieces = [
        Piece(f"heads of L{layer}", partial(decode_heads, model, layer, **options), kind="heads")
        for layer in layers
    ]
    batches = None if cfg.data is None else _read(cfg, model, cfg.data)
    if batches is not None:
        pieces += [
            Piece(f"energy of L{i}", partial(_energy, cfg, model, batches, i), kind="energies")
            for i in layers
        ]
    pairs = [(i, j) for i in layers for j in layers if i < j]
    pieces += [
        Piece(
            f"{kind}-composition of L{i} and L{j}",
            partial(_compose, cfg, model, i, j, kind),
            kind="compositions",
        )
        for i, j in pairs
        for kind in KINDS
    ]
    contents = fingerprint(model, batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return Heads(
        model=model.name,
        layers=[found.take(HeadDirections, f"heads of L{layer}") for layer in layers],
        compositions=[
            found.take(Composition, f"{kind}-composition of L{i} and L{j}")
            for kind in KINDS
            for i, j in pairs
        ],
        legacy=cfg.legacy,
        energies=[] if batches is None else [found.take(Energy, f"energy of L{i}") for i in layers],
        data=None if batches is None else batches.name,
        num_layers=int(model.facts.get("n_layers", 0)),
    )


def _read(cfg: Config, model: Model, data: str) -> Batches:
    own = TokenModelOnData(
        model=cfg.model, data=data, tokens=cfg.tokens, seed=cfg.seed, tokenizer=cfg.tokenizer
    )
    return read_data(own, model)


def _energy(cfg: Config, model: Model, batches: Batches, layer: int) -> Energy:
    inputs = (batch.map(lambda t: t.to(model.device)).inputs for batch in batches)
    return activation_energy(model, layer, inputs, folded=_folded(cfg), offset=cfg.offset)


def _folded(cfg: Config) -> bool:
    return traveling_words.DIRECTIONS["folded"] if cfg.legacy else cfg.folded


def _compose(cfg: Config, model: Model, i: int, j: int, kind: Kind) -> Composition:
    first, second = (heads(model, layer, folded=_folded(cfg)) for layer in (i, j))
    return composition(first, second, kind, num_samples=cfg.num_samples, seed=cfg.seed)


def joined(texts_of: list[str], bytes_of: list[str]) -> str:
    """Join tokens on one line, in quotes; control characters and bytes that are not UTF-8 are escaped."""
    pairs = zip(texts_of, bytes_of, strict=True)
    return " ".join(f"'{visible(label(text, raw))}'" for text, raw in pairs)
