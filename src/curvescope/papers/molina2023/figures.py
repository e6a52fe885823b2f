"""Figures of 'Traveling Words': five studies on one model, compared with the abstract and the reviews."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from curvescope.core.config import Config, setting
from curvescope.core.number_format import with_error
from curvescope.core.progress import Progress
from curvescope.geometry.attention.heads import heads as head_circuits
from curvescope.models.load import load
from curvescope.papers.common import AGREES, DIFFERS, Profile, prefixed
from curvescope.runs.resumable_loop import State
from curvescope.runs.study import Run, Study
from curvescope.runs.study_result import Claim, Line, Scene, Shown, Tables
from curvescope.studies import embeddings, heads, layernorm, probes, trajectory
from curvescope.studies.probes.study import share_kept
from curvescope.studies.problem_config import TokenModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AUTO = "auto"
MODEL = "a model name as in the study; auto: GPT-2 if it is in the local cache, else tiny-gpt"
GPT2 = ("gpt2", "openai-community/gpt2")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SHAPE = {"kind": "gpt2", "n_layers": 12, "d_model": 768, "vocab_size": 50257}
EXACT = 1e-9  # relative distance of a norm's outputs from their ellipsoid
DIGITS = 4  # decimals of our reference values for GPT-2
FULL_TOKENS = 16384
SURE = 3.0  # standard errors for a decided claim
READER = "left to the reader"

Row = list[str]
"""A claim: statement, where it is published, measured value and verdict."""
Setting = TypeVar("Setting", bound=TokenModel)


@dataclass(frozen=True)
class Reproduced(Shown):
    """A study's result as a figure of the paper, with the figure's name in all names and with claims."""

    figure: str
    model: str
    chosen: str  # reason for the choice of the model
    result: Shown
    found: list[Row]  # the claims

    def claims(self) -> list[Claim]:
        """Return the model, then the statements of the abstract and the reviews with measured values."""
        return [
            Claim("model", "GPT-2, 124M (abstract)", self.model, self.chosen, "abstract"),
            *(Claim(*row, source="abstract or reviews") for row in self.found),
        ]

    def summary(self) -> list[Line]:
        """Return the summary of the study, preceded by the model."""
        return [("model", self.model, self.chosen), *self.result.summary()]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table, with the model."""
        words = {name: f"{text} Model: {self.model}." for name, text in self.result.captions().items()}
        return prefixed(self.figure, words)

    def tables(self) -> Tables:
        """Return tables by name."""
        return prefixed(self.figure, self.result.tables())

    def figures(self) -> dict[str, Figure]:
        """Return figures by name."""
        return prefixed(self.figure, self.result.figures())

    def scenes(self) -> dict[str, Scene]:
        """Return interactive figures."""
        return prefixed(self.figure, self.result.scenes())


def with_model(cfg: Setting) -> tuple[Setting, str]:
    """Replace the model `auto` by the best available model, and give the reason."""
    if cfg.model != AUTO:
        return cfg, "as requested"
    for name in GPT2:
        if _is_cached(name):
            return replace(cfg, model=name), "the paper's model, from the local cache"
    why = "bundled model, because GPT-2 is not in the local cache; reproduce molina2023 MODEL takes any model"
    return replace(cfg, model="tiny-gpt"), why


def is_gpt2(cfg: TokenModel) -> bool:
    """Return True if the model is GPT-2 with 124 million parameters, by its shape and name."""
    if "gpt2" not in str(cfg.model).lower():
        return False
    facts = load(cfg.model, revision=cfg.revision).facts
    return all(facts.get(name) == value for name, value in SHAPE.items())


def measured_on(model: str, verdict: str) -> str:
    """Add the model's name to the verdict if it is not the paper's model."""
    return verdict if model in GPT2 else f"{verdict} on {model}"


def _is_cached(name: str) -> bool:
    """Return True if a model's configuration and weights are in the local cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    files = [try_to_load_from_cache(name, file) for file in ("config.json", *WEIGHTS)]
    return isinstance(files[0], str) and any(isinstance(file, str) for file in files[1:])


@dataclass(frozen=True)
class LayerNormConfig(layernorm.Config):
    """Settings of the study; `auto` is the best available model."""

    model: str = setting(AUTO, MODEL)


def _layernorm(cfg: LayerNormConfig, result: layernorm.LayerNorms) -> list[Row]:
    """Check 'Layer normalization confines the features to a hyper-sphere'."""
    off = max(n.identity_error for n in result.norms)
    hidden = max(1 - float(s.with_gain.mean()) for s in result.selectable)
    return [
        [
            "a norm's outputs lie on an ellipsoid, the image of a sphere",
            "stated (abstract)",
            f"largest relative distance {off:.1e} over {len(result.norms)} norms",
            measured_on(cfg.model, AGREES if off < EXACT else DIFFERS),
        ],
        [
            "keys that no query can select",
            "not in the paper",
            f"{hidden:.1%} of the sample in the layer with the largest share",
            "–",
        ],
    ]


@dataclass(frozen=True)
class EmbeddingsConfig(embeddings.Config):
    """Settings of the study; `auto` is the best available model."""

    model: str = setting(AUTO, MODEL)


def _embeddings(cfg: EmbeddingsConfig, result: embeddings.Embeddings) -> list[Row]:
    """Check 'The effect of layer normalization on word embeddings', and its extreme tokens."""
    d, table = result.distances, "a table (numbers not available)"
    l2 = f"{d.l2_mean[0]:.3f}; scaled {d.l2_mean[2]:.3f}"
    cosine = f"{d.cosine_mean[0]:.4f}; centered {d.cosine_mean[1]:.4f}"
    rows = [
        ["distance between the embedding and its normalized form", table, l2, "–"],
        ["cosine distance between the embedding and its normalized form", table, cosine, "–"],
    ]
    if result.counts is not None and np.isfinite(result.counts.spearman.get("shift", np.nan)):
        measured = f"rank correlation {result.counts.spearman['shift']:+.2f}"
        rows.append(["β·u and the frequency of a token", "not available", measured, "–"])
    return rows


@dataclass(frozen=True)
class ProbesConfig(probes.Config):
    """Settings of the study; `auto` is the best available model."""

    model: str = setting(AUTO, MODEL)


def _probes(cfg: ProbesConfig, result: probes.Probes) -> list[Row]:
    """Check 'At the last layer the heads together preserve the meaning of the input key', with nouns."""
    strength = [float(np.median(np.nanmax(p.z[:, :, 0], axis=1))) for p in result.keys]
    clear = ", ".join(f"L{p.layer} {v:.1f}" for p, v in zip(result.keys, strength, strict=True))
    kept = ", ".join(
        f"L{p.layer} {share_kept(values):.0%}" for p, values in zip(result.keys, result.values, strict=True)
    )
    return [
        [
            "query-key patterns are clear in early layers, less so later",
            "stated (abstract, reviews)",
            f"nearest key of the best head, σ above random: {clear}",
            READER,
        ],
        [
            "the last layer's heads together keep the input key",
            "stated (reviews)",
            f"share of words among the first tokens of the logit lens: {kept}",
            READER,
        ],
    ]


@dataclass(frozen=True)
class HeadsConfig(heads.Config):
    """Settings of the study; `auto` is the best available model."""

    model: str = setting(AUTO, MODEL)


def _heads(cfg: HeadsConfig, result: heads.Heads) -> list[Row]:
    """Check singular vectors of the heads; for GPT-2, compare its singular values with our reference."""
    ranks = ", ".join(f"L{x.layer} {np.median(x.qk_spectra.effective_rank):.1f}" for x in result.layers)
    row = [
        "singular pairs show patterns, for QK at layer 0",
        "stated (reviews)",
        f"effective rank of W_QK, median of {result.layers[0].num_heads} heads: {ranks}",
        READER,
    ]
    return [row, *(compare_spectra(load(cfg.model, revision=cfg.revision)) if is_gpt2(cfg) else [])]


def reference() -> dict[str, Any]:
    """Read our reference: first singular values of GPT-2's heads in blocks 0 and 5, raw and folded."""
    path = files("curvescope.papers.molina2023") / "reference" / "gpt2_spectra.json"
    return json.loads(path.read_text(encoding="utf-8"))


def compare_spectra(model: Any) -> list[Row]:
    """Compare singular values with the reference: one row per block with the largest difference."""
    rows = []
    for layer, values in reference()["blocks"].items():
        worst = 0.0
        for folded in (False, True):
            for circuit, own in zip(head_circuits(model, int(layer), folded=folded), values, strict=True):
                for name in ("qk", "vo"):
                    truth = np.array(own[f"{name}_folded" if folded else name])
                    s = getattr(circuit, name).singular_values.numpy()[: len(truth)]
                    worst = max(worst, float(np.abs(s - truth).max()))
        rows.append(
            [
                f"singular values of all heads of block {layer}, raw and folded",
                f"not published; our reference, {DIGITS} decimals",
                f"largest difference {worst:.1e}",
                AGREES if worst < 1.5 * 10.0**-DIGITS else DIFFERS,
            ]
        )
    return rows


@dataclass(frozen=True)
class TrajectoryConfig(trajectory.Config):
    """Settings of the study; `auto` is the best available model, `full` takes more tokens."""

    model: str = setting(AUTO, MODEL)
    profile: Profile = setting("quick", "full takes at least 16,384 tokens")


def _trajectory(cfg: TrajectoryConfig, result: trajectory.Trajectory) -> list[Row]:
    """Check whether a token's state approaches the next token (figure 4), for one prompt and on average."""
    rows = []
    if "angle_target" in result.path.values:
        angles = result.path.values["angle_target"][result.token]
        rows.append(
            [
                "the second-to-last token approaches the last (figure 4)",
                "stated (reviews)",
                f"angle in {result.path.states.shape[-1]} dimensions: {angles[0]:.1f}° to {angles[-1]:.1f}°",
                measured_on(cfg.model, AGREES if angles[-1] < angles[0] else DIFFERS),
            ]
        )
    if "angle_target" in result.means.curves:
        c = result.means.curves["angle_target"]
        nearer = c.change + SURE * c.change_stderr < 0
        rows.append(
            [
                f"all tokens approach {result.means.target}, more than shuffled targets",
                "requested by reviewers",
                f"angle changes by {with_error(c.change, c.change_stderr)}° minus the change with "
                "shuffled targets",
                measured_on(cfg.model, AGREES if nearer else DIFFERS),
            ]
        )
    return rows


def _figure(name: str, kind: type[Config], study: Run[Any], claims: Callable[[Any, Any], list[Row]]) -> Study:
    """Return a study on the best available model, with the claims that follow from its result."""

    def run(cfg: Any, *, progress: Progress | None = None, state: State | None = None) -> Reproduced:
        own, why = with_model(cfg)
        if getattr(cfg, "profile", "quick") == "full":
            own = replace(own, tokens=max(own.tokens, FULL_TOKENS))
        found: Any = study(own, progress=progress, state=state)
        return Reproduced(name, found.model, why, found, claims(own, found))

    return Study(kind, run)


STUDIES = {
    "layernorm": _figure("layernorm", LayerNormConfig, layernorm.run, _layernorm),
    "embeddings": _figure("embeddings", EmbeddingsConfig, embeddings.run, _embeddings),
    "probes": _figure("probes", ProbesConfig, probes.run, _probes),
    "heads": _figure("heads", HeadsConfig, heads.run, _heads),
    "trajectory": _figure("trajectory", TrajectoryConfig, trajectory.run, _trajectory),
}
