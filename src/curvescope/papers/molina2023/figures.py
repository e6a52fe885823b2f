"""The figures of 'Traveling Words': five studies on one model, beside what abstract and reviews state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from curvescope.core.config import Config, setting
from curvescope.core.numbers import with_error
from curvescope.core.progress import Progress
from curvescope.geometry.attention.heads import heads as head_circuits
from curvescope.models.load import load
from curvescope.papers.common import AGREES, DIFFERS, Profile, prefixed
from curvescope.runs.shown import Claim, Line, Scene, Shown
from curvescope.runs.study import Run, Study
from curvescope.runs.work import State
from curvescope.studies import embeddings, heads, layernorm, probes, trajectory
from curvescope.studies.probes.study import share_kept
from curvescope.studies.setting import TokenModel

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

AUTO = "auto"
MODEL = "as for the study; auto is GPT-2 where it is in the local cache, else tiny-gpt"
GPT2 = ("gpt2", "openai-community/gpt2")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SHAPE = {"kind": "gpt2", "n_layers": 12, "d_model": 768, "vocab_size": 50257}
EXACT = 1e-9  # relative distance of a norm's outputs from their ellipsoid
DIGITS = 4  # decimals of our reference for GPT-2
FULL_TOKENS = 16384
SURE = 3.0  # standard errors
READER = "a reader decides"

Row = list[str]
"""A claim: what is said, where it stands, what was measured, the verdict."""
Setting = TypeVar("Setting", bound=TokenModel)


@dataclass(frozen=True)
class Reproduced(Shown):
    """A study's result as a figure of the paper: its names carry the figure's, its claims come with it."""

    figure: str
    model: str
    chosen: str  # why this model, in words
    result: Shown
    found: list[Row]  # the claims

    def claims(self) -> list[Claim]:
        """The model, then what the abstract and the reviews state, next to what was measured."""
        return [
            Claim("model", "GPT-2, 124M (abstract)", self.model, self.chosen, "abstract"),
            *(Claim(*row, source="abstract or reviews") for row in self.found),
        ]

    def summary(self) -> list[Line]:
        """That of the study, with the model before it."""
        return [("model", self.model, self.chosen), *self.result.summary()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows, and on which model."""
        words = {name: f"{said} Model: {self.model}." for name, said in self.result.captions().items()}
        return prefixed(self.figure, words)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name."""
        return prefixed(self.figure, self.result.tables())

    def figures(self) -> dict[str, Figure]:
        """Figures by name."""
        return prefixed(self.figure, self.result.figures())

    def scenes(self) -> dict[str, Scene]:
        """Figures to turn in a browser."""
        return prefixed(self.figure, self.result.scenes())


def with_model(cfg: Setting) -> tuple[Setting, str]:
    """The settings with `auto` replaced by the best model at hand, and why that one."""
    if cfg.model != AUTO:
        return cfg, "as asked for"
    for name in GPT2:
        if _is_cached(name):
            return replace(cfg, model=name), "the paper's model, from the local cache"
    why = "bundled: GPT-2 is not in the local cache; reproduce molina2023 MODEL takes any"
    return replace(cfg, model="tiny-gpt"), why


def is_gpt2(cfg: TokenModel) -> bool:
    """Whether the model is GPT-2 with 124 million parameters, by its shape and name."""
    if "gpt2" not in str(cfg.model).lower():
        return False
    facts = load(cfg.model, revision=cfg.revision).facts
    return all(facts.get(name) == value for name, value in SHAPE.items())


def measured_on(model: str, verdict: str) -> str:
    """The verdict, with the model's name where it is not the paper's."""
    return verdict if model in GPT2 else f"{verdict} on {model}"


def _is_cached(name: str) -> bool:
    """Whether a model's configuration and weights are in the local cache; nothing is fetched."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    files = [try_to_load_from_cache(name, file) for file in ("config.json", *WEIGHTS)]
    return isinstance(files[0], str) and any(isinstance(file, str) for file in files[1:])


@dataclass(frozen=True)
class LayerNormConfig(layernorm.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def _layernorm(cfg: LayerNormConfig, found: layernorm.LayerNorms) -> list[Row]:
    """'Layer normalization confines the features to a hyper-sphere'."""
    off = max(n.identity_error for n in found.norms)
    hidden = max(1 - float(s.with_gain.mean()) for s in found.selectable)
    return [
        [
            "a norm's outputs lie on an ellipsoid, the image of a sphere",
            "stated (abstract)",
            f"largest relative distance {off:.1e} over {len(found.norms)} norms",
            measured_on(cfg.model, AGREES if off < EXACT else DIFFERS),
        ],
        [
            "keys that no query can prefer",
            "not in the paper",
            f"{hidden:.1%} of the sample in the layer with most",
            "–",
        ],
    ]


@dataclass(frozen=True)
class EmbeddingsConfig(embeddings.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def _embeddings(cfg: EmbeddingsConfig, found: embeddings.Embeddings) -> list[Row]:
    """'The effect of layer normalization on word embeddings', and its extreme tokens."""
    d, table = found.distances, "a table (numbers not at hand)"
    l2 = f"{d.l2_mean[0]:.3f}; scaled {d.l2_mean[2]:.3f}"
    cosine = f"{d.cosine_mean[0]:.4f}; centered {d.cosine_mean[1]:.4f}"
    rows = [
        ["distance of the embedding to its normalized form", table, l2, "–"],
        ["cosine distance of the two", table, cosine, "–"],
    ]
    if found.counts is not None and np.isfinite(found.counts.spearman.get("shift", np.nan)):
        measured = f"rank correlation {found.counts.spearman['shift']:+.2f}"
        rows.append(["β·u and how often a token occurs", "not at hand", measured, "–"])
    return rows


@dataclass(frozen=True)
class ProbesConfig(probes.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def _probes(cfg: ProbesConfig, found: probes.Probes) -> list[Row]:
    """'At the last layer the heads together preserve the meaning of the input key', with nouns."""
    strength = [float(np.median(np.nanmax(p.z[:, :, 0], axis=1))) for p in found.keys]
    clear = ", ".join(f"L{p.layer} {v:.1f}" for p, v in zip(found.keys, strength, strict=True))
    kept = ", ".join(
        f"L{p.layer} {share_kept(values):.0%}" for p, values in zip(found.keys, found.values, strict=True)
    )
    return [
        [
            "query-key patterns are clear in early layers, less so later",
            "stated (abstract, reviews)",
            f"best head's key, σ above random: {clear}",
            READER,
        ],
        [
            "the last layer's heads together keep the input key",
            "stated (reviews)",
            f"words among the first tokens read: {kept}",
            READER,
        ],
    ]


@dataclass(frozen=True)
class HeadsConfig(heads.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def _heads(cfg: HeadsConfig, found: heads.Heads) -> list[Row]:
    """The singular vectors of the heads; for GPT-2 itself, its singular values against our reference."""
    ranks = ", ".join(f"L{x.layer} {np.median(x.qk_spectra.effective_rank):.1f}" for x in found.layers)
    row = [
        "singular pairs show patterns, for QK at layer 0",
        "stated (reviews)",
        f"effective rank of W_QK, median of {found.layers[0].num_heads} heads: {ranks}",
        READER,
    ]
    return [row, *(compare_spectra(load(cfg.model, revision=cfg.revision)) if is_gpt2(cfg) else [])]


def reference() -> dict[str, Any]:
    """First singular values of GPT-2's heads in blocks 0 and 5, raw and folded, to four decimals; our own."""
    place = files("curvescope.papers.molina2023") / "reference" / "gpt2_spectra.json"
    return json.loads(place.read_text(encoding="utf-8"))


def compare_spectra(model: Any) -> list[Row]:
    """A row per block: the largest difference of any singular value to the reference."""
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
    """As the study; `auto` is the best model at hand, `full` takes more tokens."""

    model: str = setting(AUTO, MODEL)
    profile: Profile = setting("quick", "full takes at least 16,384 tokens")


def _trajectory(cfg: TrajectoryConfig, found: trajectory.Trajectory) -> list[Row]:
    """Does the state of a token travel to the next one (figure 4), in the space itself, and over many?"""
    rows = []
    if "angle_target" in found.path.values:
        angles = found.path.values["angle_target"][found.token]
        rows.append(
            [
                "the second-to-last token approaches the last (figure 4)",
                "stated (reviews)",
                f"angle in {found.path.states.shape[-1]} dimensions: {angles[0]:.1f}° to {angles[-1]:.1f}°",
                measured_on(cfg.model, AGREES if angles[-1] < angles[0] else DIFFERS),
            ]
        )
    if "angle_target" in found.means.curves:
        c = found.means.curves["angle_target"]
        nearer = c.change + SURE * c.change_stderr < 0
        rows.append(
            [
                f"all tokens come nearer to {found.means.target}, more than to shuffled ones",
                "asked by reviewers",
                f"angle changes by {with_error(c.change, c.change_stderr)}° beyond shuffled targets",
                measured_on(cfg.model, AGREES if nearer else DIFFERS),
            ]
        )
    return rows


def _figure(name: str, kind: type[Config], study: Run[Any], claims: Callable[[Any, Any], list[Row]]) -> Study:
    """A study on the best model at hand, with the claims that follow from its result."""

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
