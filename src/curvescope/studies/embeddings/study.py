"""The embedding of a model: how near it is to its normalized form, and which tokens are its extremes.

By length, by length behind a norm's γ and β, and by the greatest and least logit that a token can have,
β·u ± √d |P(γ ∘ u)|; and whether any of that follows how often a token occurs in a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from curvescope.core.config import at_least, setting
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.corpora import read_source
from curvescope.geometry.embeddings import Distances, Extremes, TokenScores, distances, extremes, token_scores
from curvescope.models.model import Model
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies import traveling_words
from curvescope.studies.setting import TokenModel, load_token_model
from curvescope.viz.writers import visible, write_all

if TYPE_CHECKING:
    import pandas as pd

MAX_BYTES = 1_000_000  # of the text that tokens are counted in
ROUNDING = 1e-10  # of 1 − cos, for embeddings in float32
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
    """What to look at. The defaults take a second on a CPU."""

    k: int = setting(5, "tokens at each end")
    norm: str | None = setting(None, "whose γ and β: ln_f, L0.ln1, …; by default the final one")
    which: Literal["input", "output"] | None = setting(
        None, "embedding; by default output for ln_f, else input"
    )
    legacy: bool = setting(False, "the original's scores, LayerNorm without γ and β, every row")
    data: str | None = setting("sample", "a text in which tokens are counted; legacy counts none")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "k")


@dataclass(frozen=True)
class Counts(Result):
    """How often tokens occur in a text, and how scores go with that."""

    data: str
    num_tokens: int  # of the text
    counts: np.ndarray  # (n,) as the ids of the scores
    spearman: dict[str, float]  # of each score with the count, over the tokens that occur


@dataclass(frozen=True)
class Embeddings(Shown):
    """The two tables about an embedding, and all scores."""

    model: str
    distances: Distances
    scores: TokenScores
    extremes: Extremes
    counts: Counts | None
    legacy: bool

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        d, s = self.distances, self.scores.scores
        rows = [
            ("mean |e|", f"{d.mean_norm:.3g}", f"over {d.num_tokens:,} tokens of the {d.which} embedding"),
            ("distance to n(e)", f"{d.l2_mean[0]:.3g}", f"{d.l2_mean[2]:.3g} once the rows are scaled to √d"),
        ]
        if d.cosine_mean[0] > ROUNDING:
            rows.append(("1 − cos(e, n(e))", f"{d.cosine_mean[0]:.2g}", "0 is a norm that only rescales"))
        else:
            rows.append(("direction", "kept", "the norm only rescales embeddings: n(e) points where e does"))
        if "max_logit" in s:
            most = int(s["max_logit"].argmax())
            note = f"the greatest that any token can reach: {self.scores.text[most]!r}"
            rows.append(("logit", f"{s['max_logit'][most]:.3g}", note))
        if self.counts is not None and np.isfinite(self.counts.spearman.get("shift", np.nan)):
            note = f"rank correlation of β·u with how often a token occurs in {self.counts.data}"
            rows.append(("β and frequency", f"{self.counts.spearman['shift']:+.2f}", note))
        return rows

    def opening(self) -> str:
        """What these numbers say."""
        d, s = self.distances, self.scores.scores
        turned = f"turns them by 1 − cos = {d.cosine_mean[0]:.2g} on average"
        said = f"Rows of the {d.which} embedding have a mean length of {d.mean_norm:.3g}, and the first norm "
        said += turned if d.cosine_mean[0] > ROUNDING else "only rescales them"
        if "max_logit" not in s:
            return f"{said}."
        most, least = int(s["max_logit"].argmax()), int(s["max_logit"].argmin())
        return (
            f"{said}. No state can give any token a logit above {s['max_logit'][most]:.3g} "
            f"({self.scores.text[most]!r}), nor {self.scores.text[least]!r} one above "
            f"{s['max_logit'][least]:.3g}."
        )

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        at = f"γ and β of {self.scores.norm}, {self.scores.which} embedding"
        return {
            "distances": "Distance of four forms of the embedding to its rows on the sphere of the norm "
            "(without γ and β): as it is, less the mean row, scaled to length √d on average, and both.",
            "scores": f"Scores of all tokens ({at}), with the tokens at both ends. A logit is between "
            "β·u ± √d |P(γ ∘ u)|, whatever the state.",
            "reach": f"What a token's logit is made of ({at}): β·u, which every state gives it, and √d |P(γ "
            "∘ u)|, which the best state adds. Without β: against the count of the token.",
            "extremes": f"Top and bottom tokens by each score ({at}); bytes are those of the token.",
            "frequency": "Spearman rank correlation of each score with the count of the token in the text, "
            "over the tokens that occur.",
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """Distances, extremes, and the correlation with frequency."""
        import pandas as pd

        extremes = self.extremes.to_frame()
        extremes["String"] = [visible(text) for text in self.extremes.text]
        found = {"distances": self.distances.to_frame(), "extremes": extremes}
        if self.counts is not None:
            rows = [
                {"score": name, "words": WORDS[name], "Spearman": value}
                for name, value in self.counts.spearman.items()
            ]
            found["frequency"] = pd.DataFrame(rows)
        return found

    def files(self) -> dict[str, str]:
        """The tables in other formats; in legacy mode as the original printed them."""
        found = write_all(self.tables(), self.captions(), tokens=("String",))
        if self.legacy:
            found["word_embeddings.txt"] = traveling_words.embedding_text(self.distances, self.extremes)
        return found


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Embeddings:
    """Make the two tables.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
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
    """The text in which tokens are counted; None where none are."""
    if cfg.legacy or cfg.data is None or model.tokenizer is None:
        return None
    return read_source(cfg.data, max_bytes=MAX_BYTES)


def _counts(data: str, text: str, model: Model, scores: TokenScores) -> Counts:
    """Counts of the tokens in the text."""
    from scipy.stats import rankdata

    ids = np.array(model.tokenizer.encode(text), dtype=np.int64)
    counts = np.bincount(ids, minlength=int(scores.ids.max()) + 1)[scores.ids]
    seen = counts > 0
    found = {}
    for name, values in scores.scores.items():
        varies = seen.sum() > 2 and np.ptp(values[seen]) > 0 and np.ptp(counts[seen]) > 0
        found[name] = _spearman(rankdata(values[seen]), rankdata(counts[seen])) if varies else float("nan")
    return Counts(data, len(ids), counts, found)


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of ranks."""
    return float(np.corrcoef(a, b)[0, 1])
