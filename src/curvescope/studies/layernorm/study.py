"""Geometry of normalization layers: the ellipsoid of their outputs, and keys that no query can select.

The outputs of a norm lie on the ellipsoid {γ ∘ n + β}. The study gives its axes, largest coordinates and
shift for every norm, with outputs on real data. For each head it also finds the keys inside the convex hull
of the other keys: no query can give them the highest attention score (Brody, Alon & Yahav 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.geometry.attention.selectable import Selectable, selectable_keys
from curvescope.geometry.roles import norm_of
from curvescope.geometry.sphere import Ellipsoid, ellipsoid, radius
from curvescope.geometry.stream import stream
from curvescope.models.model import Model
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Shown, Tables
from curvescope.studies.problem_config import (
    TokenModelOnData,
    choose_layers,
    load_token_model,
    read_data,
    short_notes,
)
from curvescope.viz.writers import write_all

NUM_OUTLIERS = 5


@dataclass(frozen=True)
class Config(TokenModelOnData):
    """Settings of the study. The defaults take some seconds on a CPU."""

    tokens: int = setting(512, "tokens read from the text", least=1)
    layers: tuple[int, ...] = setting(
        (), "layers whose keys are tested; by default all of a small model, else the first, middle and last"
    )
    norms: tuple[str, ...] = setting((), "norms to analyze, such as L0.ln1; by default all")
    num_keys: int = setting(120, "number of random tokens whose keys are tested", least=2)


@dataclass(frozen=True)
class NormShape(Result):
    """Ellipsoid of one norm, and its outputs on the data."""

    role: str
    ellipsoid: Ellipsoid
    shift: float  # |β|
    radius: float  # mean |n(x)| over the data: √d, reduced by ε
    on_axes: np.ndarray  # (n, 2) outputs on the data along the two longest semi-axes
    outliers: np.ndarray  # coordinates with the largest |γ|
    outlier_gains: np.ndarray
    identity_error: float  # largest | Σ ((y − β)/γ)² / |n|² − 1 | over the data


@dataclass(frozen=True)
class LayerNorms(Shown):
    """Norms of a model and keys of its heads."""

    model: str
    data: str
    d: int
    norms: list[NormShape]
    selectable: list[Selectable]
    seed: int

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        ratio = {n.role: n.ellipsoid.semi_axes[0] / n.ellipsoid.semi_axes[-1] for n in self.norms}
        role, most = max(ratio.items(), key=lambda item: item[1])
        shift = {n.role: n.shift / np.sqrt(np.mean(n.ellipsoid.semi_axes**2)) for n in self.norms}
        most_shifted, relative_shift = max(shift.items(), key=lambda item: item[1])
        rows = [
            ("sphere", f"{np.sqrt(self.d):.2f}", f"radius √d of the sphere, d = {self.d}"),
            (
                "longest / shortest",
                f"{most:.3g}",
                f"ratio of the axes of the ellipsoid of {role}, the most stretched norm",
            ),
            (
                "shift",
                f"{relative_shift:.2g}",
                f"|β| over the root mean square semi-axis of {most_shifted}, the largest shift of all norms",
            ),
        ]
        for s in self.selectable:
            hidden, plain = (1 - x.mean() for x in (s.with_gain, s.without_norm))
            note = (
                f"mean over the heads of L{s.layer}, {s.num_tokens} keys each: no query can select these keys"
            )
            note += f"; {plain:.1%} without the norm"
            crowd = s.crowded.sum() / max((~s.with_gain).sum(), 1)
            note += f"; {crowd:.0%} of them almost coincide with another key" if crowd else ""
            rows.append(("unselectable", f"{hidden:.1%}", note))
        return rows + [("note", "", note) for note in self.notes]

    def opening(self) -> str:
        """State the main result in one or two sentences."""
        ratio = {n.role: n.ellipsoid.semi_axes[0] / n.ellipsoid.semi_axes[-1] for n in self.norms}
        most = max(ratio, key=ratio.__getitem__)
        stretched = (
            f"Among {plural(len(self.norms), 'norm')}, {most} stretches its outputs most: the longest "
            f"axis of its ellipsoid is {ratio[most]:.3g} times the shortest"
        )
        if not self.selectable:
            return f"{stretched}."
        hidden = {s.layer: float(1 - s.with_gain.mean()) for s in self.selectable}
        layer = max(hidden, key=hidden.__getitem__)
        return (
            f"{stretched}. In L{layer}, no query can select {hidden[layer]:.1%} of the keys of random tokens."
        )

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        return {
            "picture": "Sketch in two dimensions, not from this model: a norm maps every state to a sphere, "
            "γ stretches the sphere to an ellipsoid, β shifts it, and the next matrix transforms it.",
            "axes": "Semi-axes of the ellipsoid {γ ∘ n + β} of every norm: √d times the singular values "
            "of Γ P. The dashed line is the sphere before γ.",
            "states": f"Outputs of the norms for tokens of {self.data}, minus β, along the two longest "
            "semi-axes. The line is the outline of the ellipsoid; the outputs fill only a part of it.",
            "selectable": "Share of the keys of random tokens that no query of a head can select, because "
            "they lie in the convex hull of the other keys. Hatched: keys with another key within a "
            "tenth of the median distance.",
            "norms": "One row per norm: longest, median and shortest semi-axis, |β|, mean |n(x)|, the "
            "coordinates with the largest |γ|, and the largest relative distance of an output from the "
            "ellipsoid.",
            "keys": "Sampled keys that no query can select: with γ, with γ = 1, and without a norm. A "
            "crowded key (counted with γ) has another key within a tenth of the median distance; the "
            "keys of tokens that never occur in training are an example. Identical keys can only be "
            "selected together.",
        }

    def tables(self) -> Tables:
        """Return the table of norms and the table of keys that no query can select."""
        tables: Tables = {"norms": [_row(n) for n in self.norms]}
        if self.selectable:
            frames = [s.to_frame() for s in self.selectable]
            for s, frame in zip(self.selectable, frames, strict=True):
                frame["head"] = [f"L{s.layer}.h{h}" for h in frame["head"]]
            tables["keys"] = frames
        return tables

    def files(self) -> dict[str, str]:
        """Return the tables in other formats."""
        return write_all(self.tables(), self.captions())


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> LayerNorms:
    """Measure the norms on the data, and test the keys of the chosen layers."""
    model = load_token_model(cfg)
    roles = _roles(cfg, model)
    layers = choose_layers(cfg.layers, model)
    batches = read_data(cfg, model)
    inputs = _norm_inputs(model, batches)
    test_keys = partial(selectable_keys, model, num_tokens=cfg.num_keys, seed=cfg.seed)
    pieces = [
        *(Piece(f"norm {role}", partial(_shape, model, role, inputs)) for role in roles),
        *(Piece(f"keys of L{layer}", partial(test_keys, layer)) for layer in layers),
    ]
    contents = fingerprint(model, batches)
    results = work_through(pieces, contents=contents, progress=progress, state=state)
    selectable = [results.take(Selectable, f"keys of L{layer}") for layer in layers]
    return LayerNorms(
        model=model.name,
        data=batches.name,
        d=model.facts["d_model"],
        norms=[results.take(NormShape, f"norm {role}") for role in roles],
        selectable=selectable,
        seed=cfg.seed,
        notes=short_notes(cfg, model)
        + ([note for note in selectable[0].notes if "foldable" in note] if selectable else []),
    )


def _roles(cfg: Config, model: Model) -> list[str]:
    """Names of the norms in the residual stream: those in the settings, or all."""
    layers = range(model.facts.get("n_layers", 0))
    order = ["ln_e", *(f"L{i}.ln{j}" for i in layers for j in (1, 2)), "ln_f"]
    known = [role for role in order if f"{role}.g" in model.blocks]
    if not known:
        raise UsageError(
            f"expected a model whose norms have weights, but {model.name!r} has none",
            hint="set norm_affine = true, or choose another model",
        )
    for role in cfg.norms:
        if role not in known:
            raise UsageError(f"norms: expected some of {', '.join(known)}, got {role!r}")
    return list(cfg.norms) or known


def _norm_inputs(model: Model, batches: Batches) -> dict[str, torch.Tensor]:
    """Input (pre-norm) or output (post-norm) of each norm for all tokens of the data: (M, d)."""
    streams = [stream(model, batch.map(lambda t: t.to(model.device)).inputs) for batch in batches]
    points = torch.cat([s.points.flatten(0, 1) for s in streams]).double().cpu()  # (M, N, d)
    layers = range(model.facts["n_layers"])
    shift = 0 if model.facts.get("norm") == "pre" else 1
    inputs = {f"L{i}.ln{j}": points[:, 2 * i + j - 1 + shift] for i in layers for j in (1, 2)}
    return inputs | {"ln_f": points[:, -1], "ln_e": points[:, 0]}


def _shape(model: Model, role: str, inputs: dict[str, torch.Tensor]) -> NormShape:
    norm = norm_of(model, role)
    assert norm.gamma is not None
    shape = ellipsoid(norm.gamma, norm.beta, kind=norm.kind, name=role)
    x = inputs[role]
    behind = model.facts.get("norm") == "post" or role == "ln_e"
    y = x if behind else norm(x)
    beta = torch.from_numpy(shape.center)
    size = torch.from_numpy(shape.axes[:, :2].copy())
    n = (y - beta) / norm.gamma
    length = n.norm(dim=-1) if behind else radius(x, kind=norm.kind, eps=norm.eps)
    order = norm.gamma.abs().argsort(descending=True, stable=True)[:NUM_OUTLIERS]
    return NormShape(
        role=role,
        ellipsoid=shape,
        shift=float(beta.norm()),
        radius=float(length.mean()),
        on_axes=((y - beta) @ size).numpy(),
        outliers=order.numpy(),
        outlier_gains=norm.gamma[order].numpy(),
        identity_error=float((n.square().sum(-1) / length.square() - 1).abs().max()),
    )


def _row(n: NormShape) -> dict[str, object]:
    axes = n.ellipsoid.semi_axes
    pairs = zip(n.outliers, n.outlier_gains, strict=True)
    return {
        "norm": n.role,
        "longest": float(axes[0]),
        "median": float(np.median(axes)),
        "shortest": float(axes[-1]),
        "|β|": n.shift,
        "|n(x)|": n.radius,
        "largest γ": ", ".join(f"{int(i)}: {g:.3g}" for i, g in pairs),
        "off the ellipsoid": n.identity_error,
    }
