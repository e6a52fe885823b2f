"""Embedding of a model: its distance from its normalized form, and its extreme tokens.

Scores are the length, the length after a norm's γ and β, and the largest and smallest logit that a token
can have, β·u ± √d |P(γ ∘ u)|. The study correlates each score with the frequency of the token in a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.corpora import read_source
from curvescope.geometry.embeddings import Distances, Extremes, TokenScores, distances, extremes, token_scores
from curvescope.models.model import Model
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Shown, Tables
from curvescope.studies import traveling_words
from curvescope.studies.problem_config import TokenModel, load_token_model
from curvescope.viz.writers import visible, write_all

MAX_BYTES = 1_000_000  # maximum size of the text in which tokens are counted
ROUNDING = 1e-10  # rounding error of 1 − cos, for embeddings in float32
WORDS = {
    "original": "|e|",
    "scale": "|γ ∘ e|",
    "bias": "|e| + β·e",
    "bias_and_scale": "|γ ∘ e| + β·e",
    "max_logit": "greatest logit",
    "min_logit": "least logit",
    "reach": "|P(γ ∘ e)|",
    "shift": "β·e",
    "angle_to_ones": "angle to (1, …, 1)",
    "distance_to_mean": "distance to the mean",
}


@dataclass(frozen=True)
class Config(TokenModel):
    """Embedding, norm and text. The defaults take a second on a CPU."""

    k: int = setting(5, "tokens at each end", least=1)
    norm: str | None = setting(None, "norm that provides γ and β: ln_f, L0.ln1, …; default: the final one")
    which: Literal["input", "output"] | None = setting(
        None, "embedding; default: output for ln_f, else input"
    )
    legacy: bool = setting(False, "scores of the original code: LayerNorm without γ and β, every row")
    data: str | None = setting("sample", "text in which tokens are counted; legacy does not count")


@dataclass(frozen=True)
class Counts(Result):
    """Counts of tokens in a text, and their correlation with scores."""

    data: str
    num_tokens: int  # tokens of the text
    counts: np.ndarray  # (n,) in the order of the ids of the scores
    spearman: dict[str, float]  # correlation of each score with the count, over tokens that occur


@dataclass(frozen=True)
class Embeddings(Shown):
    """Distances, scores and counts of an embedding."""

    model: str
    distances: Distances
    scores: TokenScores
    extremes: Extremes
    counts: Counts | None
    legacy: bool

    def summary(self) -> list[Line]:
        """Return the key numbers: label, value, explanation."""
        d, s = self.distances, self.scores.scores
        rows = [
            ("mean |e|", f"{d.mean_norm:.3g}", f"over {d.num_tokens:,} tokens of the {d.which} embedding"),
            ("distance to n(e)", f"{d.l2_mean[0]:.3g}", f"{d.l2_mean[2]:.3g} after scaling the rows to √d"),
        ]
        if d.cosine_mean[0] > ROUNDING:
            rows.append(
                ("1 − cos(e, n(e))", f"{d.cosine_mean[0]:.2g}", "0 means that the norm only rescales")
            )
        else:
            rows.append(("direction", "kept", "the norm only rescales embeddings: n(e) is parallel to e"))
        if "max_logit" in s:
            most = int(s["max_logit"].argmax())
            note = f"largest logit that any token can reach: {self.scores.text[most]!r}"
            rows.append(("logit", f"{s['max_logit'][most]:.3g}", note))
        if self.counts is not None and np.isfinite(self.counts.spearman.get("shift", np.nan)):
            note = f"rank correlation of β·u with the token's frequency in {self.counts.data}"
            rows.append(("β and frequency", f"{self.counts.spearman['shift']:+.2f}", note))
        return rows

    def opening(self) -> str:
        """Summarize the result in two sentences."""
        d, s = self.distances, self.scores.scores
        turned = f"rotates them by 1 − cos = {d.cosine_mean[0]:.2g} on average"
        said = f"Rows of the {d.which} embedding have a mean length of {d.mean_norm:.3g}, and the first norm "
        said += turned if d.cosine_mean[0] > ROUNDING else "only rescales them"
        if "max_logit" not in s:
            return f"{said}."
        most, least = int(s["max_logit"].argmax()), int(s["max_logit"].argmin())
        return (
            f"{said}. The largest logit that a token can reach is {s['max_logit'][most]:.3g} "
            f"({self.scores.text[most]!r}); for {self.scores.text[least]!r} it is only "
            f"{s['max_logit'][least]:.3g}."
        )

    def captions(self) -> dict[str, str]:
        """Return a caption for each figure and table."""
        at = f"γ and β of {self.scores.norm}, {self.scores.which} embedding"
        return {
            "distances": "Distance of four forms of the embedding to its normalized rows (without γ and "
            "β): original, minus the mean row, scaled to mean length √d, and both.",
            "scores": f"Scores of all tokens ({at}), with the tokens at both ends. For every state, a "
            "logit is between β·u ± √d |P(γ ∘ u)|.",
            "reach": f"Components of a token's logit ({at}): β·u, the same for every state, and √d |P(γ "
            "∘ u)|, the maximum over states. Without β: against the count of the token.",
            "extremes": f"Top and bottom tokens by each score ({at}); bytes are the bytes of the token.",
            "frequency": "Spearman rank correlation of each score with the count of the token in the text, "
            "over the tokens that occur.",
        }

    def tables(self) -> Tables:
        """Return distances, extremes, and the correlation with frequency."""
        extremes = self.extremes.to_frame()
        extremes["String"] = [visible(text) for text in self.extremes.text]
        found: Tables = {"distances": self.distances.to_frame(), "extremes": extremes}
        if self.counts is not None:
            rows = [
                {"score": name, "words": WORDS[name], "Spearman": value}
                for name, value in self.counts.spearman.items()
            ]
            found["frequency"] = rows
        return found

    def files(self) -> dict[str, str]:
        """Return the tables in other formats; in legacy mode, in the format of the original code."""
        found = write_all(self.tables(), self.captions(), tokens=("String",))
        if self.legacy:
            found["word_embeddings.txt"] = traveling_words.embedding_text(self.distances, self.extremes)
        return found


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Embeddings:
    """Compute scores and distances, and count tokens."""
    model = load_token_model(cfg)
    text = _text(cfg, model)
    of_scores: dict[str, Any] = {"norm": cfg.norm, "which": cfg.which}
    of_distances: dict[str, Any] = {"norm": cfg.norm, "which": cfg.which or "input"}
    if cfg.legacy:
        of_scores |= {**traveling_words.SCORES, "which": cfg.which or traveling_words.SCORES["which"]}
        of_distances |= traveling_words.DISTANCES
    pieces = [
        Piece("scores", partial(token_scores, model, **of_scores), "scores of the embedding"),
        Piece("distances", partial(distances, model, **of_distances), "distances of the embedding"),
    ]
    found = work_through(pieces, contents=fingerprint(model, text), progress=progress, state=state)
    scores = found.take(TokenScores, "scores")
    chosen = (
        None
        if cfg.legacy
        else [n for n in WORDS if n in scores.scores and n not in ("reach", "distance_to_mean")]
    )
    return Embeddings(
        model=model.name,
        distances=found.take(Distances, "distances"),
        scores=scores,
        extremes=extremes(scores, k=cfg.k, settings=chosen),
        counts=None if text is None else _counts(f"text:{cfg.data}", text, model, scores),
        legacy=cfg.legacy,
    )


def _text(cfg: Config, model: Model) -> str | None:
    """Return the text in which tokens are counted, or None."""
    if cfg.legacy or cfg.data is None or model.tokenizer is None:
        return None
    return read_source(cfg.data, max_bytes=MAX_BYTES)


def _counts(data: str, text: str, model: Model, scores: TokenScores) -> Counts:
    """Count the tokens in the text, and correlate scores with counts."""
    from scipy.stats import rankdata

    ids = np.array(model.tokenizer.encode(text), dtype=np.int64)
    counts = np.bincount(ids, minlength=int(scores.ids.max()) + 1)[scores.ids]
    seen = counts > 0
    found = {}
    for name, values in scores.scores.items():
        varies = seen.sum() > 2 and np.ptp(values[seen]) > 0 and np.ptp(counts[seen]) > 0
        ranks = np.corrcoef(rankdata(values[seen]), rankdata(counts[seen])) if varies else None
        found[name] = float("nan") if ranks is None else float(ranks[0, 1])
    return Counts(data, len(ids), counts, found)
