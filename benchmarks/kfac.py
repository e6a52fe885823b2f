"""Distance of K-FAC, EK-FAC and Shampoo from the exact GGN and Hessian of blocks, on trained models.

    python benchmarks/kfac.py [--assets FOLDER] [--out benchmarks/results/kfac]

The models are the bundled model on the sample text, and stories260K if FOLDER has it (without its tokenizer,
on text that it generates itself). Products with the identity give the exact GGN and Hessian of every block in
float64. The approximations use all output columns (kind="ggn"), so that the script measures the error of the
Kronecker product only. It writes a saved result, a table and a figure for each model.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import curvescope as cs
from curvescope.core.seeds import generator

BLOCKS = {
    "tiny-gpt": ("L3.h0.W_Q", "L3.h0.W_K", "L3.h0.W_V", "L3.h0.W_O"),
    "stories260K": ("L4.h0.W_Q", "L4.W_K", "L4.W_V", "L4.h0.W_O"),
}
NUM_SEQUENCES, LENGTH = 3, 4


def bundled() -> cs.Problem:
    """Return the bundled model on the beginning of the sample text."""
    model = cs.load("tiny-gpt", dtype="float64")
    return cs.Problem(model, cs.text_data("sample", model, tokens=NUM_SEQUENCES * LENGTH, seq_len=LENGTH))


def stories(folder: Path) -> cs.Problem:
    """Return stories260K on tokens that it generates from its first token."""
    model = cs.load(folder, dtype="float64")
    ids = torch.ones(NUM_SEQUENCES, 1, dtype=torch.long)
    source = generator(0)
    for _ in range(LENGTH):
        p = model.evaluate(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=source)], dim=1)
    return cs.Problem(model, (ids[:, :-1], ids[:, 1:]))


def table(quality: cs.operators.KFACQuality) -> str:
    """Return one row per block, with a group of columns per quantity."""
    heads = {
        "error_ggn": "‖K − H_o‖ / ‖H_o‖",
        "error_hessian": "‖K − H‖ / ‖H‖",
        "lambda_max": "λ_max(K) / λ_max(H_o)",
        "cosine": "cosine of the steps",
    }
    parts = []
    for name, head in heads.items():
        last = {"error_hessian": ["GGN itself"], "cosine": ["gradient"]}.get(name, [])
        columns = ["block", *quality.methods, *last]
        rows = [f"**{head}**", "", f"| {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) - 1)]
        more = {"error_hessian": quality.ggn_error_hessian, "cosine": quality.cosine_gradient}.get(name)
        for s, layer in enumerate(quality.layers):
            values = [*getattr(quality, name)[:, s], *([] if more is None else [more[s]])]
            rows.append(f"| {layer} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path(os.environ.get("CURVESCOPE_ASSETS", "assets")))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kfac")
    args = parser.parse_args()
    problems = {"tiny-gpt": bundled}
    if (args.assets / "stories260K").exists():
        problems["stories260K"] = lambda: stories(args.assets / "stories260K")
    for name, make in problems.items():
        start, problem = time.process_time(), make()
        quality = cs.kfac_quality(problem, *BLOCKS[name])
        quality.save(args.out / name)
        quality.plot().savefig(args.out / name / "quality.png", dpi=110)
        spent = time.process_time() - start
        data = f"{problem.num_terms:.0f} tokens, loss {problem.loss_value():.3f}"
        head = f"## {name}\n\n{data}, δ = {quality.damping} λ_max(H_o)."
        (args.out / name / "table.md").write_text(f"{head}\n\n{table(quality)}\n", encoding="utf-8")
        print(f"{head} {spent:.0f} s of processor time.\n\n{table(quality)}\n", flush=True)


if __name__ == "__main__":
    main()
