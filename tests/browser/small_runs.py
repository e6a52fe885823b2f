"""One small run of every kind that the page has a section for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from curvescope.studies import run_study
from drawings import sketched

MODEL = "n_layers = 1\nd_model = 4\nn_heads = 2\nd_ff = 4\nvocab_size = 12\nn_ctx = 18\n"
SETTINGS: dict[str, dict[str, Any]] = {
    "diagnose": {"num_probes": 1, "num_steps": 4, "num_shared": 2, "block_steps": 3, "num_parts": 2,
                 "part_steps": 4, "num_sample_probes": 2},
    "spectrum": {"num_steps": 8, "num_probes": 2, "num_eigenvalues": 1, "num_trace_probes": 2,
                 "num_map_probes": 2, "max_products": 8},
    "blocks": {"num_trace_probes": 2, "num_norm_probes": 2, "num_small_probes": 2, "num_sharp_steps": 3,
               "num_steps": 6, "density": ["L*.W_Q", "L*.W_V"], "num_density_probes": 2},
    "propagation": {"num_probes": 2, "num_steps": 3, "num_map_probes": 2},
    "taylor": {"num_top": 1, "num_points": 5, "plane_points": 3, "num_steps": 4,
               "settle": 0.0, "cubic": False},
    "heads": {"k": 2, "num": 1, "num_samples": 2},
    "trajectory": {"tokens": 36, "num_shuffles": 1},
}  # fmt: skip


def small_runs(root: Path) -> list[Path]:
    """Run every study of `SETTINGS` on one small model; their folders."""
    model = root / "small.toml"
    model.write_text(MODEL, encoding="utf-8")
    common = {"model": str(model), "data": "task:addition?num_sequences=4"}
    found = []
    with sketched():
        for study, settings in SETTINGS.items():
            given = {**common, **settings} if study != "heads" else {"model": str(model), **settings}
            found.append(run_study.run(study, given, out=root / "runs")[0])
    return found
