"""The singular vectors of the heads; for GPT-2 itself, its singular values against our reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.geometry.attention.heads import heads as head_circuits
from curvescope.models.load import load
from curvescope.papers.claims import AGREES, DIFFERS
from curvescope.papers.molina2023.setting import AUTO, MODEL, Reproduced, is_gpt2, with_model
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import heads

DIGITS = 4


@dataclass(frozen=True)
class Config(heads.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reproduced:
    """The study; for GPT-2 the comparison of its spectra."""
    own, why = with_model(cfg)
    found = heads.run(own, progress=progress, state=state)
    first = found.layers[0]
    ranks = ", ".join(f"L{x.layer} {np.median(x.qk_spectra.effective_rank):.1f}" for x in found.layers)
    claims = [
        [
            "singular pairs show patterns, for QK at layer 0",
            "stated (reviews)",
            f"effective rank of W_QK, median of {first.num_heads} heads: {ranks}",
            "a reader decides",
        ]
    ]
    if is_gpt2(own):
        claims += compare_spectra(load(own.model, revision=own.revision))
    return Reproduced("heads", found.model, why, found, claims)


def reference() -> dict[str, Any]:
    """First singular values of GPT-2's heads in blocks 0 and 5, raw and folded, to four decimals; our own."""
    place = files("curvescope.papers.molina2023") / "reference" / "gpt2_spectra.json"
    return json.loads(place.read_text(encoding="utf-8"))


def compare_spectra(model: Any) -> list[list[str]]:
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
        agrees = worst < 1.5 * 10.0**-DIGITS
        rows.append(
            [
                f"singular values of all heads of block {layer}, raw and folded",
                f"not published; our reference, {DIGITS} decimals",
                f"largest difference {worst:.1e}",
                AGREES if agrees else DIFFERS,
            ]
        )
    return rows


STUDY = Study(Config, run)
