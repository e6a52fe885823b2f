"""What the norms of a model do: a sphere, an ellipsoid, its place, and keys that no query can prefer.

The outputs of a norm lie on the ellipsoid {γ ∘ n + β}; its axes, longest coordinates and shift for every norm
of the model, with real states on it. And for each head, which keys lie inside the hull of the others, so that
no query can attend to them most (Brody, Alon & Yahav 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.numbers import plural
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.geometry.attention.selectable import Selectable, selectable_keys
from curvescope.geometry.roles import norm_of
from curvescope.geometry.sphere import Ellipsoid, ellipsoid, radius
from curvescope.geometry.stream import stream
from curvescope.models.model import Model
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.setting import (
    TokenModelOnData,
    choose_layers,
    load_token_model,
    read_data,
    short_notes,
)
from curvescope.viz.writers import write_all

if TYPE_CHECKING:
    import pandas as pd

NUM_OUTLIERS = 5


@dataclass(frozen=True)
class Config(TokenModelOnData):
    """What to look at. The defaults take some seconds on a CPU."""

    tokens: int = setting(512, "of a text")
    layers: tuple[int, ...] = setting(
        (), "whose keys are tested; by default all of a small model, else the first, middle and last"
    )
    norms: tuple[str, ...] = setting((), "roles such as L0.ln1; by default all")
    num_keys: int = setting(120, "tokens whose keys are tested")

    def __post_init__(self) -> None:
        as_tuples(self, "layers", "norms")
        super().__post_init__()
        at_least(self, 1, "tokens")
        at_least(self, 2, "num_keys")


@dataclass(frozen=True)
class NormShape(Result):
    """One norm: its ellipsoid, and states of the data on it."""

    role: str
    ellipsoid: Ellipsoid
    shift: float  # |β|
    radius: float  # mean |n(x)| of the data, √d less what ε takes
    on_axes: np.ndarray  # (n, 2) of the data, along the two longest semi-axes
    outliers: np.ndarray  # coordinates with the largest |γ|
    outlier_gains: np.ndarray
    identity_error: float  # largest | Σ ((y − β)/γ)² / |n|² − 1 | over the data


@dataclass(frozen=True)
class LayerNorms(Shown):
    """The norms of a model, and the keys of its heads."""

    model: str
    data: str
    d: int
    norms: list[NormShape]
    selectable: list[Selectable]
    seed: int

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        ratio = {n.role: n.ellipsoid.semi_axes[0] / n.ellipsoid.semi_axes[-1] for n in self.norms}
        role, most = max(ratio.items(), key=lambda item: item[1])
        shift = {n.role: n.shift / np.sqrt(np.mean(n.ellipsoid.semi_axes**2)) for n in self.norms}
        moved, by = max(shift.items(), key=lambda item: item[1])
        rows = [
            ("sphere", f"{np.sqrt(self.d):.2f}", f"its radius √d, d = {self.d}"),
            ("longest / shortest", f"{most:.3g}", f"axis of the ellipsoid of {role}, the most stretched"),
            ("shift", f"{by:.2g}", f"|β| over the mean semi-axis of {moved}, the most moved"),
        ]
        for s in self.selectable:
            hidden, plain = (1 - x.mean() for x in (s.with_gain, s.without_norm))
            note = f"of {s.num_tokens} keys in L{s.layer}, mean over heads: no query prefers them"
            note += f"; {plain:.1%} without the norm"
            crowd = s.crowded.sum() / max((~s.with_gain).sum(), 1)
            note += f"; {crowd:.0%} of them all but coincide with another key" if crowd else ""
            rows.append(("unselectable", f"{hidden:.1%}", note))
        return rows + [("note", "", note) for note in self.notes]

    def opening(self) -> str:
        """What these numbers say."""
        ratio = {n.role: n.ellipsoid.semi_axes[0] / n.ellipsoid.semi_axes[-1] for n in self.norms}
        most = max(ratio, key=ratio.__getitem__)
        said = (
            f"Of {plural(len(self.norms), 'norm')}, {most} is stretched most: its longest axis is "
            f"{ratio[most]:.3g} times its shortest"
        )
        if not self.selectable:
            return f"{said}."
        hidden = {s.layer: float(1 - s.with_gain.mean()) for s in self.selectable}
        layer = max(hidden, key=hidden.__getitem__)
        return f"{said}. In L{layer} no query can prefer {hidden[layer]:.1%} of the keys of random tokens."

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return {
            "picture": "In the plane, and not from this model: a norm puts every state on a sphere, γ makes "
            "it an ellipsoid, β moves it, and a matrix maps it on.",
            "axes": "Semi-axes of the ellipsoid {γ ∘ n + β} of every norm, √d × the singular values of Γ P; "
            "dashed is the sphere before γ.",
            "states": f"Outputs of the norms for tokens of {self.data}, along the two longest semi-axes, "
            "less β; the line is the outline of the ellipsoid. The states fill only a part of it.",
            "selectable": "Share of the keys of random tokens that no query of a head can prefer, because "
            "they lie in the convex hull of the others. Hatched: keys that another one lies very close to, "
            "within a tenth of the median distance.",
            "norms": "One row per norm: longest, median and shortest semi-axis, |β|, mean |n(x)|, the "
            "coordinates with the largest |γ|, and how exactly the states lie on the ellipsoid.",
            "keys": "Keys of a sample of tokens that no query prefers: with γ, with γ = 1, without a norm. "
            "Crowded ones of those with γ have another key within a tenth of the median distance, such as "
            "tokens that training never saw: these lie together, and are out of reach together. Keys that "
            "are the same as another can be selected only together.",
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """The norms, and the keys that cannot be selected."""
        import pandas as pd

        found = {"norms": pd.DataFrame([_row(n) for n in self.norms])}
        if self.selectable:
            frames = [s.to_frame() for s in self.selectable]
            for s, frame in zip(self.selectable, frames, strict=True):
                frame["head"] = [f"L{s.layer}.h{h}" for h in frame["head"]]
            found["keys"] = pd.concat(frames, ignore_index=True)
        return found

    def files(self) -> dict[str, str]:
        """The tables in other formats."""
        return write_all(self.tables(), self.captions())


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> LayerNorms:
    """Measure the norms on the data, and test the keys of the chosen layers.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
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
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    selectable = [found.take(Selectable, f"keys of L{layer}") for layer in layers]
    return LayerNorms(
        model=model.name,
        data=batches.name,
        d=model.facts["d_model"],
        norms=[found.take(NormShape, f"norm {role}") for role in roles],
        selectable=selectable,
        seed=cfg.seed,
        notes=short_notes(cfg, model)
        + ([note for note in selectable[0].notes if "foldable" in note] if selectable else []),
    )


def _roles(cfg: Config, model: Model) -> list[str]:
    """Norms of the stream: the model's own, or those asked for."""
    layers = range(model.facts.get("n_layers", 0))
    order = ["ln_e", *(f"L{i}.ln{j}" for i in layers for j in (1, 2)), "ln_f"]
    known = [role for role in order if f"{role}.g" in model.blocks]
    if not known:
        raise UsageError(
            f"expected a model whose norms have weights, got {model.name!r}, which has none",
            hint="norm_affine = true, or another model",
        )
    for role in cfg.norms:
        if role not in known:
            raise UsageError(f"norms: expected some of {', '.join(known)}, got {role!r}")
    return list(cfg.norms) or known


def _norm_inputs(model: Model, batches: Batches) -> dict[str, torch.Tensor]:
    """What each norm reads (pre-norm) or gives (post-norm), for all tokens of the data: (M, d)."""
    seen = [stream(model, batch.map(lambda t: t.to(model.device)).inputs) for batch in batches]
    points = torch.cat([s.points.flatten(0, 1) for s in seen]).double().cpu()  # (M, N, d)
    layers = range(model.facts["n_layers"])
    shift = 0 if model.facts.get("norm") == "pre" else 1
    found = {f"L{i}.ln{j}": points[:, 2 * i + j - 1 + shift] for i in layers for j in (1, 2)}
    return found | {"ln_f": points[:, -1], "ln_e": points[:, 0]}


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
