"""Paths of tokens through a model: does a token's state move to the next token, and how?

The first part averages over many tokens: angles to the start, end and target of a path, the logit lens along
the path, and the shares of attention and feed-forward. Shuffled targets give the baseline. The second part
draws the path of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.number_format import with_error
from curvescope.core.progress import Progress
from curvescope.data.batches import Batches
from curvescope.data.corpora import CORPORA, read_source
from curvescope.geometry.projection import APART, Method, Projection, need_umap, project, project_apart
from curvescope.geometry.roles import embedding, has_lens, norm_of
from curvescope.geometry.sphere import StreamNorm
from curvescope.geometry.stream import stream
from curvescope.geometry.trajectory.paths import Path, Trajectories, follow, trajectories
from curvescope.geometry.vocabulary.names import names_of
from curvescope.models.model import Model
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Scene, Shown
from curvescope.studies import traveling_words
from curvescope.studies.problem_config import TASK, TokenModelOnData, load_token_model, read_data, short_notes
from curvescope.viz.writers import write_all

PROMPT = "To kill two birds with one stone"
PROMPT_WORDS = 8  # words taken from a user's own text


@dataclass(frozen=True)
class Config(TokenModelOnData):
    """Settings of the study. The defaults take a few seconds on a CPU."""

    prompt: str = setting(
        PROMPT, "prompt whose tokens are drawn; by default, a user's own text gives its first words"
    )
    token: int = setting(-2, "position of the token whose path is drawn; -2 is the token before the last")
    projection: Method = setting("pca", "projection of the states in the figures")
    num_shuffles: int = setting(2, "permutations of the targets in the baseline", least=1)
    neighbors: int = setting(15, "neighbors of UMAP", least=2)
    min_dist: float = setting(0.1, "minimum distance of UMAP")
    legacy: bool = setting(
        False, "draw the original's figure: Euclidean UMAP of raw embeddings, with states added later"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "tokens", "seq_len", "batch_size")


@dataclass(frozen=True)
class Trajectory(Shown):
    """Averages over a text, and the path of one prompt."""

    model: str
    data: str
    means: Trajectories
    path: Path
    reads: list[list[str]]  # (T, N) first token of the logit lens, as text; empty without a lens
    token: int  # position of the token whose path is drawn
    target: int | None  # position of its target in the prompt
    picture: Projection  # of T tokens, then of T × N states

    @property
    def words_xyz(self) -> np.ndarray:
        """(T, 3) coordinates of the prompt's tokens as the unembedding reads them."""
        return self.picture.coordinates[: len(self.path.tokens)]

    @property
    def states_xyz(self) -> np.ndarray:
        """(T, N, 3) coordinates of the states."""
        T, N = self.path.states.shape[:2]
        return self.picture.coordinates[T:].reshape(T, N, -1)

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        m, words = self.means, []
        where = f"{m.num_tokens:,} tokens, {m.num_sequences} sequences of {self.data}"
        if "angle_target" in m.curves:
            c = m.curves["angle_target"]
            assert c.shuffled is not None
            note = f"at the input {c.mean[0]:.1f}°; with shuffled targets {c.shuffled[-1]:.1f}°; {where}"
            words.append((f"angle to {m.target}", f"{c.mean[-1]:.1f}°", note))
            shuffled = f"{c.shuffled[0]:.1f}° to {c.shuffled[-1]:.1f}°"
            note = f"from input to output, minus the change with shuffled targets ({shuffled}); "
            note += f"{c.falling:.0%} of the tokens come closer"
            words.append(("change of that angle", f"{with_error(c.change, c.change_stderr)}°", note))
        if "logp_target" in m.curves:
            c = m.curves["logp_target"]
            note = f"of the target, by the logit lens; {c.mean[0]:.2f} at the input"
            words.append(("log p at the output", with_error(float(c.mean[-1]), float(c.stderr[-1])), note))
        length, angle = m.curves["length"].mean[-1], m.curves["angle_start"].mean[-1]
        words.append(("path", f"{length:.0f}°", f"length on the sphere; its ends are {angle:.0f}° apart"))
        share = m.shares["attention_share"]
        note = f"largest share of attention in a block's step, in {m.blocks[int(share.mean.argmax())]}"
        words.append(("attention", f"{share.mean.max():.0%}", note))
        return words + [("note", "", note) for note in [*m.notes, *self.notes]]

    def opening(self) -> str:
        """State the main result in one or two sentences."""
        m = self.means
        length, ends = m.curves["length"].mean[-1], m.curves["angle_start"].mean[-1]
        travels = (
            f"On average, a token of {self.data} travels {length:.0f}° on the sphere and ends "
            f"{ends:.0f}° from its start"
        )
        if "angle_target" not in m.curves:
            return f"{travels}."
        c = m.curves["angle_target"]
        shift = f"{with_error(abs(c.change), c.change_stderr)}°"
        if abs(c.change) < 2 * c.change_stderr:
            return f"{travels}; the data do not decide if it comes closer to {m.target} than to other tokens."
        way = "closer to" if c.change < 0 else "farther from"
        return (
            f"{travels}, {shift} {way} {m.target} than with shuffled targets ({c.falling:.0%} of the "
            "tokens come closer)."
        )

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        m = self.means
        bands = "bands are two standard errors, with sequences as the independent units"
        lens = "the logit lens (final norm and unembedding applied to the state)"
        apart = self.picture.method == APART
        how = "; tokens are raw embeddings" if apart else ", fitted to all points at once"
        left_out = "Labels that would overlap are left out."
        own = f"{short_quote(self.path.prompt)}"
        return {
            "target": f"Distance of a token's state from {m.target}: angle on the sphere of normalized "
            "states between the state and P(γ_f ∘ u) of the target, and the target's probability by "
            f"{lens}; {bands}. Dashed: the same with the targets of other tokens ({m.num_shuffles} "
            "permutations). Small dots lie inside a block, between attention and feed-forward. The rank "
            "is a geometric mean.",
            "motion": f"Motion of a token, averaged over {m.num_tokens:,} tokens; {bands}. Angles are "
            "between normalized states. Every point after the input ends a step of attention (small "
            "dots) or feed-forward. A turn is the angle between two steps: 90° is orthogonal to the "
            "previous step. Shares are ⟨part, step⟩ / |step|² of each block's step.",
            "prompt": f"{own}: angle to {m.target} at every point, and the first token of the logit lens. "
            "Gray: the prompt does not contain the target.",
            "grid": f"{own}: all tokens at the input and after the first and last blocks, and the path of "
            f"one token up to there. {self.picture.words}{how}. {left_out}",
            "path": f"{own}: path of one token among the directions of the prompt's tokens, from three "
            f"sides. {self.picture.words}. {left_out}",
            "paths": f"{own}: drag to rotate, scroll to zoom, select the token whose path is drawn. "
            f"{self.picture.words}.",
            "change": "Change from the input to the output, minus the change with shuffled targets, token "
            "by token.",
            "shares": "Share of attention in each block's step, and the lengths of both parts.",
            "tokens": "Tokens of the prompt: their targets, and the tokens of the logit lens at the output.",
        }

    def files(self) -> dict[str, str]:
        """Return the tables in other formats."""
        return write_all(self.tables(), self.captions())

    def scenes(self) -> dict[str, Scene]:
        """Return figures to rotate in a browser, as plotly JSON."""
        from curvescope.viz.trajectory import path_scene

        p = self.path
        return {"paths": path_scene(self.words_xyz, self.states_xyz, p.tokens, p.names, token=self.token)}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Trajectory:
    """Measure the averages, follow the prompt, and project it."""
    if cfg.legacy:
        need_umap()
    model = load_token_model(cfg)
    batches = read_data(cfg, model)
    prompt = _prompt(cfg, model, batches)
    path = follow(model, prompt)  # first, because it raises an error if the prompt does not fit
    token = _token(cfg, path)
    means = partial(trajectories, model, batches, num_shuffles=cfg.num_shuffles, seed=cfg.seed)
    picture = partial(_picture_apart, cfg, model, path) if cfg.legacy else partial(_picture, cfg, path)
    pieces = [
        Piece("means", means, "paths of all tokens"),
        Piece("path", lambda: path, "the prompt"),
        Piece("picture", picture),
    ]
    contents = fingerprint(model, batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    target = None if not model.facts.get("causal", True) or token + 1 == len(path.tokens) else token + 1
    return Trajectory(
        model=model.name,
        data=batches.name,
        means=found.take(Trajectories, "means"),
        path=found.take(Path, "path"),
        reads=_reads(model, path),
        token=token,
        target=target,
        picture=found.take(Projection, "picture"),
        notes=short_notes(cfg, model),
    )


def _picture(cfg: Config, path: Path) -> Projection:
    points = np.concatenate([path.words, path.states.reshape(-1, path.states.shape[-1])])
    options: dict[str, Any] = {"neighbors": cfg.neighbors, "min_dist": cfg.min_dist}
    return project(points, method=cfg.projection, seed=cfg.seed, **options)


def _picture_apart(cfg: Config, model: Model, path: Path) -> Projection:
    """Project raw embeddings of the prompt, then its states after the final norm, one depth at a time."""
    E = embedding(model)
    norm = norm_of(model, "ln_f") if has_lens(model) else StreamNorm("none")
    ids = torch.from_numpy(path.ids)
    points = norm(stream(model, ids[None].to(model.device)).points[0].double().cpu()).numpy()  # (T, N, d)
    groups = [E[ids].numpy(), *(points[:, n] for n in range(points.shape[1]))]
    found = project_apart(
        E[: traveling_words.FITTED_ROWS].numpy(),
        groups,
        seed=cfg.seed,
        neighbors=cfg.neighbors,
        min_dist=cfg.min_dist,
    )
    words, states = found.coordinates[: len(ids)], found.coordinates[len(ids) :]
    by_token = states.reshape(points.shape[1], len(ids), -1).swapaxes(0, 1)
    return replace(found, coordinates=np.concatenate([words, by_token.reshape(-1, words.shape[1])]))


def _prompt(cfg: Config, model: Model, batches: Batches) -> str | list[int]:
    """Return the prompt: the one in the settings, or the beginning of the user's own text.

    Returns the first sequence of the task for a model without a tokenizer.
    """
    if model.tokenizer is not None:
        own = cfg.data not in CORPORA and not cfg.data.startswith((TASK, "hf:"))
        return beginning(read_source(cfg.data)) if own and cfg.prompt == PROMPT else cfg.prompt
    inputs = batches[0].inputs
    return (inputs["input_ids"] if isinstance(inputs, dict) else inputs)[0].tolist()


def beginning(text: str) -> str:
    """Return the first words of the first line with at least three words, or the default prompt."""
    lines = (line.split()[:PROMPT_WORDS] for line in text.splitlines())
    return " ".join(next((words for words in lines if len(words) > 2), PROMPT.split()))


def _token(cfg: Config, path: Path) -> int:
    T = len(path.tokens)
    if not -T <= cfg.token < T:
        raise UsageError(f"token: expected one of the prompt's {T} tokens (0 to {T - 1}), got {cfg.token}")
    return cfg.token % T


def _reads(model: Model, path: Path) -> list[list[str]]:
    if (path.reads_id < 0).any():
        return []
    names = names_of(model.tokenizer)
    return [names.texts(row) for row in path.reads_id.tolist()]


def short_quote(prompt: str, most: int = 60) -> str:
    """Return the prompt in quotation marks, shortened if it is long."""
    return f"'{prompt}'" if len(prompt) <= most else f"'{prompt[: most - 1]}…'"
