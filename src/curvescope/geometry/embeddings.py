"""Two tables about an embedding: its distance from its normalized form, and its extreme tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
from curvescope.core.result import Tabular
from curvescope.geometry.roles import Which, embedding, has_lens, norm_of
from curvescope.geometry.sphere import NormKind, StreamNorm
from curvescope.geometry.vocabulary.names import names_of
from curvescope.models.model import Model

SETTINGS = ("Original", "Centered", "Scaled", "Centered & Scaled")
LENGTHS = ("original", "scale", "bias", "bias_and_scale")
_CHUNK = 4096


@dataclass(frozen=True)
class Distances(Tabular):
    """Distance of four forms of the embedding to n(E): original, centered, scaled, centered and scaled.

    The mean row is subtracted from centered rows. Scaled rows have a factor √d / mean row length.
    """

    settings: list[str]  # four names
    l2_mean: np.ndarray  # (4,)
    l2_std: np.ndarray  # (4,) with n − 1
    cosine_mean: np.ndarray  # (4,) of 1 − cos
    cosine_std: np.ndarray  # (4,)
    mean_norm: float  # mean length of the rows
    num_tokens: int
    which: str  # input or output embedding
    norm: str  # kind of the norm

    def table(self) -> Any:
        """One row per setting."""
        return {
            "setting": self.settings,
            "mean_l2_distance": self.l2_mean,
            "l2_std_dev": self.l2_std,
            "mean_cosine_distance": self.cosine_mean,
            "cosine_std_dev": self.cosine_std,
        }


@dataclass(frozen=True)
class TokenScores(Tabular):
    """Scores of every token, by name, for the rows e of an embedding and γ, β of a norm.

    original |e|; scale |γ ∘ e|; bias |e| + β·e; bias_and_scale |γ ∘ e| + β·e; max_logit and min_logit
    β·e ± √d |P(γ ∘ e)|; reach |P(γ ∘ e)|; shift β·e; angle_to_ones in degrees, between e and (1, …, 1);
    distance_to_mean |e − ē|.
    """

    ids: np.ndarray  # (n,)
    scores: dict[str, np.ndarray]  # (n,) each
    text: list[str]
    bytes: list[str]
    norm: str  # role of the norm
    which: str
    legacy: InitVar[object] = None  # ignored; older saved results have this field

    def table(self) -> Any:
        """One row per token."""
        return {"id": self.ids, "text": self.text, "bytes": self.bytes, **self.scores}


@dataclass(frozen=True)
class Extremes(Tabular):
    """Top and bottom tokens by each score: rows Top 1 … k, then Bottom k … 1, for every setting."""

    setting: list[str]
    position: list[str]
    score: np.ndarray
    ids: np.ndarray
    text: list[str]
    bytes: list[str]
    norm: str
    which: str

    def table(self) -> Any:
        """One row per listed token."""
        return {
            "Position": self.position,
            "Norm": self.score,
            "String": self.text,
            "Bytes": self.bytes,
            "Setting": self.setting,
        }


def distances(
    model: Model,
    *,
    which: Which = "input",
    norm: str | StreamNorm | None = None,
    all_rows: bool = False,
    tokenizer: Any = None,
) -> Distances:
    """Measure the distance of four forms of the embedding E from n(E), its rows normalized without γ and β.

    Args:
        which: input or output embedding.
        norm: role of a norm, or a `StreamNorm`, whose kind and ε are used; default `ln_f`, or the first norm.
        all_rows: include rows that are not tokens of the tokenizer.
    """
    table = embedding(model, which)
    norm_object = norm if isinstance(norm, StreamNorm) else _norm(model, norm)
    ids = torch.arange(len(table)) if all_rows else _ids(model, table, tokenizer)
    factor = math.sqrt(table.shape[1])
    mean, length = _mean_row(table, ids), _mean_length(table, ids)
    measured: list[list[tuple[Tensor, Tensor]]] = [[] for _ in SETTINGS]
    for e in _rows(table, ids):
        n = norm_object.sphere(e)
        for i, form in enumerate((e, e - mean, e * factor / length, (e - mean) * factor / length)):
            cosine = 1 - torch.cosine_similarity(form, n, dim=1, eps=1e-300)
            measured[i].append(((form - n).norm(dim=1), cosine))
    l2, cosine = (torch.stack([torch.cat([p[j] for p in parts]) for parts in measured]) for j in (0, 1))
    return Distances(
        list(SETTINGS),
        l2.mean(1).numpy(),
        _std(l2),
        cosine.mean(1).numpy(),
        _std(cosine),
        length,
        len(ids),
        which,
        norm_object.kind,
    )


def token_scores(
    model: Model,
    *,
    norm: str | None = None,
    which: Which | None = None,
    scores: Sequence[str] | None = None,
    all_rows: bool = False,
    tokenizer: Any = None,
) -> TokenScores:
    """Return scores of every token, with γ and β of a norm.

    Args:
        norm: role of the norm: `ln_f`, `L3.ln1`, …; default `ln_f`, or the first norm after the embedding.
        which: rows of the input or the output embedding; the default is output for `ln_f`, else input.
        scores: names of the scores to return, such as `LENGTHS`; default all of them.
        all_rows: include rows that are not tokens of the tokenizer.
    """
    norm_object = _norm(model, norm)
    which = which or ("output" if norm_object.name == "ln_f" else "input")
    table, names = embedding(model, which), names_of(model.tokenizer if tokenizer is None else tokenizer)
    ids = torch.arange(len(table)) if all_rows else names.known(len(table))
    mean = _mean_row(table, ids)
    parts = [_scores(e, norm_object, mean) for e in _rows(table, ids)]
    score_names = list(parts[0]) if scores is None else _known(scores, list(parts[0]))
    columns = {name: torch.cat([part[name] for part in parts]).numpy() for name in score_names}
    token_ids = ids.tolist()
    return TokenScores(
        ids.numpy(), columns, names.texts(token_ids), names.hexes(token_ids), norm_object.name, which
    )


def extremes(scores: TokenScores, *, k: int = 5, settings: Sequence[str] | None = None) -> Extremes:
    """Return the k largest and the k smallest tokens by each score; ties are broken by id.

    Args:
        settings: names of scores; default all of them.
    """
    if k < 1:
        raise UsageError(f"expected k of at least 1, got {k}")
    chosen = _known(scores.scores if settings is None else settings, list(scores.scores))
    k = min(k, len(scores.ids))
    rows: list[tuple[str, str, int]] = []
    for name in chosen:
        values = scores.scores[name]
        top = np.lexsort((scores.ids, -values))[:k]
        bottom = np.lexsort((scores.ids, values))[:k]
        rows += [(name, f"Top {i + 1}", int(indices)) for i, indices in enumerate(top)]
        rows += [(name, f"Bottom {i + 1}", int(indices)) for i, indices in reversed(list(enumerate(bottom)))]
    indices = [row[2] for row in rows]
    return Extremes(
        [row[0] for row in rows],
        [row[1] for row in rows],
        np.array([scores.scores[name][i] for name, _, i in rows]),
        scores.ids[indices],
        [scores.text[i] for i in indices],
        [scores.bytes[i] for i in indices],
        scores.norm,
        scores.which,
    )


def _known(requested: Iterable[str], names: list[str]) -> list[str]:
    """Return the requested names of scores. Raise UsageError for an unknown name."""
    chosen = list(requested)
    for name in chosen:
        if name not in names:
            raise UsageError(f"no score is called {name!r}", hint=near_misses(name, names))
    return chosen


def _scores(e: Tensor, norm: StreamNorm, mean: Tensor) -> dict[str, Tensor]:
    """Return the scores of rows e (c, d)."""
    length, shift = e.norm(dim=1), norm.shift(e)
    scaled = length if norm.gamma is None else (norm.gamma * e).norm(dim=1)
    values = (length, scaled, length + shift, scaled + shift)
    scores: dict[str, Tensor] = dict(zip(LENGTHS, values, strict=True))
    low, high = norm.attainable(e)
    angle = torch.rad2deg(torch.arccos((e.sum(1) / (length * math.sqrt(e.shape[1]))).clamp(-1, 1)))
    return scores | {
        "max_logit": high,
        "min_logit": low,
        "reach": norm.direction(e).norm(dim=1),
        "shift": shift,
        "angle_to_ones": angle,
        "distance_to_mean": (e - mean).norm(dim=1),
    }


def _norm(model: Model, role: str | None) -> StreamNorm:
    """Return the norm of a role; by default the final, the embedding's, or one without weights."""
    if role is not None:
        return norm_of(model, role)
    if has_lens(model):
        return norm_of(model, "ln_f")
    if "ln_e.g" in model.blocks:
        return norm_of(model, "ln_e")
    kind: NormKind = "layernorm" if model.facts.get("norm_kind") != "rmsnorm" else "rmsnorm"
    return StreamNorm(kind, name="a norm without weights")


def _ids(model: Model, table: Tensor, tokenizer: Any) -> Tensor:
    return names_of(model.tokenizer if tokenizer is None else tokenizer).known(len(table))


def _rows(table: Tensor, ids: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(ids), _CHUNK):
        yield table[ids[start : start + _CHUNK]].double()


def _mean_row(table: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([e.sum(0) for e in _rows(table, ids)]).sum(0) / len(ids)


def _mean_length(table: Tensor, ids: Tensor) -> float:
    return float(torch.cat([e.norm(dim=1) for e in _rows(table, ids)]).mean())


def _std(x: Tensor) -> np.ndarray:
    """Standard deviation over the last axis with n − 1; 0 for a single value."""
    return x.std(1).numpy() if x.shape[1] > 1 else np.zeros(len(x))
