"""Compare the results of two versions of this package: all studies and figures of papers, at a small size.

    python scripts/compare_results.py run BEFORE            # with PYTHONPATH=src of one version
    python scripts/compare_results.py run AFTER --only gap  # and of the other
    python scripts/compare_results.py compare BEFORE AFTER

`run` writes a folder for each study (`studies/NAME`) and for each figure (`papers/PAPER/NAME`): `result.json`
and `arrays.npz` as saved, `shown.json` with summary, opening, captions, tables and claims, and every figure
as PNG. With `--stored FOLDER` it renders the results saved under that folder without computing.
`compare` lists each entry that is not equal, with the size of the difference. The names of classes are
compared without their modules; times are not compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "n_layers = 1\nd_model = 8\nn_heads = 2\nd_ff = 8\nvocab_size = 12\nn_ctx = 18\n"
SMALL = {"model": "MODEL", "data": "task:addition?num_sequences=4", "dtype": "float64"}
FEW_TOKENS = {"tokens": 24, "seq_len": 8}
STUDIES: dict[str, dict[str, Any]] = {
    "activations": {"tokens": 12, "seq_len": 6, "points": ["L0", "L3"], "num_steps": 4, "num_probes": 2},
    "blocks": {
        **SMALL, "num_trace_probes": 2, "num_norm_probes": 2, "num_small_probes": 2, "num_sharp_steps": 3,
        "num_steps": 6, "density": ["L*.W_Q", "L*.W_V"], "num_density_probes": 2,
    },
    "bounds": {
        "num_seeds": 2, "weight_scales": [0.1, 2.0], "data_scales": [3.0], "query_scales": [1.0, 1000.0],
        "output_scales": [0.0, 0.1], "depths": [2], "num_layers": [1, 2], "num_tokens": 4, "width": 3,
        "head_size": 2, "hidden": 3,
    },
    "causal": {**FEW_TOKENS, "layers": [3], "alphas": [-0.1, 0.1]},
    "compare": {**FEW_TOKENS, "num_probes": 4, "num_steps": 6},
    "diagnose": {
        **SMALL, "num_probes": 2, "num_steps": 4, "num_shared": 2, "block_steps": 3, "num_parts": 2,
        "part_steps": 4, "num_sample_probes": 2,
    },
    "dynamics": {
        "experiments": ["edge", "grokking"], "steps": 6, "every": 2, "num_sequences": 4, "num_probes": 2,
        **FEW_TOKENS,
    },
    "embeddings": {},
    "exact_spectra": {
        "head_size": 3, "num_seeds": 2, "num_draws": 3, "num_rung_draws": 2, "bundled_tokens": 0, "seed": 1,
    },
    "factors": {
        "width": 4, "sequences": 2, "seeds": 3, "checkpoints": [0, 4], "steps": 2, "every": 2, "trials": 2,
        "dampings": [1.0], "draws": 50,
    },
    "full_hessian": {
        "num_images": 60, "patch_size": 4, "d_model": 4, "d_ff": 3, "batch_size": 6, "seeds": 2, "steps": 1,
        "num_points": 2, "num_probes": 2, "num_steps": 2, "dtype": "float64",
    },
    "gap": {
        **SMALL, "blocks": ["L*.W_V", "L*.W_2"], "max_exact": 80, "num_draws": 4, "num_density_probes": 2,
        "num_probes": 3, "num_steps": 4,
    },
    "heads": {"layers": [0, 1], "num_samples": 5},
    "hvp": {"batch_size": 2, "seq_len": 8, "rounds": 1, "contenders": ["hessian", "ggn"]},
    "influence": {
        **SMALL, "data": "task:addition", "max_products": 4, "cases": ["MLP"], "num_removed": 4,
        "num_checked": 2, "draws": 50,
    },
    "landscape": {
        **SMALL, "data": "task:addition?num_sequences=12",
        "blocks": ["L0.ln*", "L0.b_*"], "num_orders": 20, "num_curved": 8, "num_probes": 8,
        "radii": [0.0, 0.03], "num_pairs": 3, "num_subsets": 4, "num_norms": 2, "num_steps": 6,
    },
    "layernorm": {"tokens": 128, "seq_len": 32, "layers": [0], "num_keys": 30},
    "optimizers": {
        "optimizers": ["sgd", "adamw", "newton_cg"], "arenas": ["addition"], "rates": [0.001, 0.1],
        "max_trials": 3, "seeds": 2, "budget": 0.02, "looks": 3, "batch_size": 4,
    },
    "probes": {"layers": [0, -1], "num_random": 20},
    "propagation": {**SMALL, "num_probes": 3, "num_steps": 3, "num_map_probes": 2},
    "prune": {
        **FEW_TOKENS, "held_out": 0.5, "blocks": ["L3.b_O", "L3.b_Q"], "num_weights": 6, "settle": 4,
        "num_groups": 6, "draws": 50, "sparsities": [0.25, 0.5],
    },
    "quantize": {
        **FEW_TOKENS, "held_out": 0.5, "blocks": ["L3.W_O", "L3.W_V"], "bits": [4, 3], "max_dense": 0,
        "draws": 50,
    },
    "scaling": {
        "widths": [2, 4], "sequences": [2, 4], "seeds": 2, "steps": 3, "held_out": 8, "fresh": 64,
        "num_probes": 2, "num_steps": 2, "draws": 50, "measured": 4, "tolerance": 0.2,
    },
    "sinks": {
        **FEW_TOKENS, "biases": [4.0], "strengths": [2.0], "gates": [0.5], "texts": 3, "num_probes": 2,
        "num_steps": 4, "block_steps": 2,
    },
    "spectrum": {
        **SMALL, "num_steps": 8, "num_probes": 2, "num_eigenvalues": 1, "num_trace_probes": 2,
        "num_map_probes": 2, "max_products": 20,
    },
    "taylor": {
        **SMALL, "num_top": 1, "num_points": 5, "plane_points": 3, "num_steps": 10, "fit_steps": 20,
        "settle": 0.0,
    },
    "trajectory": {
        "tokens": 128, "seq_len": 32, "prompt": "To kill two birds with one stone", "num_shuffles": 1,
    },
    "weight_norms": {
        "blocks": ["L0.W_Q", "L1.W_V"], "tokens": 8, "seq_len": 8, "num_models": 4, "num_steps": 4,
        "draws": 50,
    },
    "why_adam": {"seeds": 3, "steps": 40, "width": 4, "batch_size": 2, "measured": 2, "draws": 60},
}  # fmt: skip
PAPERS: dict[str, dict[str, dict[str, Any]]] = {
    "molina2023": {
        "layernorm": {"model": "tiny-gpt"},
        "embeddings": {"model": "tiny-gpt"},
        "probes": {"model": "tiny-gpt"},
        "heads": {"model": "tiny-gpt"},
        "trajectory": {"model": "tiny-gpt"},
    },
    "ormaniec2025": {
        "heatmap": {"blocks": ["L0.W_[QKVO]"]},
        "histograms": {},
        "growth": {
            "experiments": ["mlp_L*", "softmax_none_ce_log_L1"],
            "repeats": 2,
            "every": 9,
            "probes": 2,
        },
        "statements": {},
        "beyond": {
            "blocks": ["E", "L0.W_[QKV]"],
            "d_model": 4,
            "n_heads": 1,
            "activation": "relu",
            "scales": 4,
        },
        "reviewers": {"seeds": 2, "sequences": 1, "steps": 2, "scales": 4},
    },
    "petrov2025": {
        "full_hessian": {"seeds": 1, "steps": 1},
        "landscape": {},
        "convergence": {"num_orders": 3},
        "propagation": {"seeds": 2, "steps": 2, "tokens": 16},
        "scaling": {"seeds": 1},
        "bounds": {},
    },
    "singh2025": {
        "exact_spectra": {
            "head_size": 3,
            "num_seeds": 2,
            "num_draws": 3,
            "num_rung_draws": 2,
            "bundled_tokens": 0,
        },
        "gap": {"seeds": 2, "steps": [0, 2], "tokens": 16},
        "norms": {"models": 4, "tokens": 16},
        "sinks": {"texts": 2, "tokens": 48, "num_probes": 2, "num_steps": 4},
    },
}
SLOW = ("papers/petrov2025/landscape", "papers/petrov2025/convergence", "papers/petrov2025/scaling",
        "papers/petrov2025/full_hessian", "papers/petrov2025/bounds")  # fmt: skip
"""Figures whose smallest profile takes minutes: made only by name; `--stored` shows saved results of them."""
TIMES = ("*seconds*", "*rates/*time*", "*times*", "*cost*", "studies/hvp/*")
RENAMED = {"optimizers": "optimizers", "quantize": "quantize"}


# -------------------------------------------------------------------------------------------------------- run


def names() -> list[str]:
    """Return the names of all studies and figures, which are also the names of their folders."""
    figures = [f"papers/{paper}/{figure}" for paper, each in PAPERS.items() for figure in each]
    return [*(f"studies/{name}" for name in STUDIES), *figures]


def compute(name: str, model: Path) -> Any:
    """Return the result of a study or figure."""
    from curvescope import papers, studies

    kind, *rest = name.split("/")
    if kind == "studies":
        study, settings = studies.find(rest[0]), STUDIES[rest[0]]
    else:
        study, settings = papers.find_figure(*rest), PAPERS[rest[0]][rest[1]]
    settings = {key: str(model) if value == "MODEL" else value for key, value in settings.items()}
    return study.run(study.Config.from_dict(settings))


def write(result: Any, folder: Path) -> None:
    """Save a result, all its texts and all its figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    result.save(folder)
    shown = {
        "summary": result.summary(),
        "opening": result.opening(),
        "beside": result.beside(),
        "subjects": result.subjects(),
        "captions": result.captions(),
        "tables": {key: json.loads(table.to_json(orient="split")) for key, table in result.tables().items()},
        "claims": [list(claim) for claim in result.claims()],
        "files": result.files(),
        "scenes": sorted(result.scenes()),
    }
    text = json.dumps(shown, indent=1, ensure_ascii=False, default=str)
    (folder / "shown.json").write_text(text, encoding="utf-8")
    for key, figure in result.figures().items():
        figure.savefig(folder / f"{key}.png", dpi=50)
        plt.close(figure)


def run(out: Path, only: list[str], stored: Path | None) -> int:
    """Write the folders, and return the number of failures."""
    from curvescope.runs.study_result import Shown

    out.mkdir(parents=True, exist_ok=True)
    model = out / "small.toml"
    model.write_text(MODEL, encoding="utf-8")
    if stored is None:
        chosen = [n for n in names() if ({n, *n.split("/")} & set(only) if only else n not in SLOW)]
        work = {name: lambda name=name: compute(name, model) for name in chosen}
    else:
        places = sorted(stored.rglob("result.json"))
        work = {f"stored/{p.parent.relative_to(stored)}": lambda p=p: Shown.load(p.parent) for p in places}
    failed = 0
    for name, make in work.items():
        begun = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write(make(), out / name)
            print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
        except Exception as error:  # continue with the others
            failed += 1
            traceback.print_exc()
            print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    return failed


# ---------------------------------------------------------------------------------------------------- compare


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the values of a JSON tree with their paths, and classes without their modules."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value.rpartition(".")[2] if key == "@class" else value, f"{path}/{key}")
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{path}/{i}")
    else:
        yield path, tree


def contents(folder: Path) -> dict[str, Any]:
    """Return all entries in the folder of one result."""
    entries: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            tree = json.loads(path.read_text(encoding="utf-8"))
            entries |= {f"{path.name}{key}": value for key, value in leaves(tree)}
        elif path.suffix == ".npz":
            with np.load(path) as archive:
                entries |= {f"{path.name}/{key}": archive[key] for key in archive.files}
        elif path.suffix == ".png":
            from matplotlib import image

            entries[path.name] = image.imread(path)
    return entries


def difference(a: Any, b: Any) -> str | None:
    """Describe the difference of two values; None if they are equal."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return f"shape {a.shape} against {b.shape}"
        if a.dtype.kind not in "fc":
            return None if np.array_equal(a, b) else "other entries"
        if np.array_equal(a, b, equal_nan=True):
            return None
        return f"largest difference {np.nanmax(np.abs(a - b)):.3g} of {np.nanmax(np.abs(a)):.3g}"
    if a == b or (a != a and b != b):
        return None
    numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return f"{a!r} against {b!r}" + (f", a difference of {abs(a - b):.3g}" if numbers else "")


def folders(root: Path) -> dict[str, Path]:
    """Return the results under a folder by name; renamed studies have their old name."""
    by_name = {path.parent.relative_to(root): path.parent for path in root.rglob("result.json")}
    return {"/".join(RENAMED.get(part, part) for part in name.parts): path for name, path in by_name.items()}


def compare(before: Path, after: Path, only: list[str]) -> int:
    """Print the differences, and return the number of different results."""
    old, new = folders(before), folders(after)
    chosen = [n for n in sorted(old | new) if not only or {n, *n.split("/")} & set(only)]
    differing = 0
    for name in chosen:
        if name not in old or name not in new:
            print(f"{name}: only in {before if name in old else after}")
            differing += name in old
            continue
        a, b = contents(old[name]), contents(new[name])
        lines = [f"{key}: only in one" for key in sorted(a.keys() ^ b.keys())]
        lines += [f"{key}: {text}" for key in a if key in b and (text := difference(a[key], b[key]))]
        timed = [
            line
            for line in lines
            if any(fnmatch(f"{name}/{line.partition(': ')[0]}", glob) for glob in TIMES)
        ]
        lines = [line for line in lines if line not in timed]
        note = f" ({len(timed)} times differ)" if timed else ""
        print(f"{name}: {'equal' if not lines else f'{len(lines)} differences'}, {len(a)} entries{note}")
        print("".join(f"    {line}\n" for line in lines[:20]), end="")
        differing += bool(lines)
    return differing


def main() -> None:
    """Parse the command line, and run one of the two commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="compute and write into a folder")
    runs.add_argument("out", type=Path)
    runs.add_argument("--stored", type=Path, help="show the results saved under this folder instead")
    compares = commands.add_parser("compare", help="compare two folders")
    compares.add_argument("before", type=Path)
    compares.add_argument("after", type=Path)
    for each in (runs, compares):
        each.add_argument("--only", nargs="+", default=[], help="names of studies, papers or figures")
    given = parser.parse_args()
    if given.command == "run":
        sys.exit(min(run(given.out, given.only, given.stored), 1))
    sys.exit(min(compare(given.before, given.after, given.only), 1))


if __name__ == "__main__":
    main()
