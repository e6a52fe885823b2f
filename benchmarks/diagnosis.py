"""Measure if `diagnose` finds planted faults, and its false alarms on healthy models.

    OMP_NUM_THREADS=1 python benchmarks/diagnosis.py --calibrate    # healthy, other seeds: for the limits
    OMP_NUM_THREADS=1 python benchmarks/diagnosis.py                # 20 seeds: hits and false alarms
    python benchmarks/diagnosis_tables.py                           # the tables of docs/diagnose.md

The script appends one line per case and seed to a file, so that an interrupted run resumes. Models
are Transformers of the zoo (3 layers, width 24; 8 or 12 layers, width 32), fresh or trained for 100 steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import curvescope as cs
from curvescope.data.batches import Batches
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.running.attention_interventions import AttentionChange, changed_attention
from curvescope.models.zoo import REVISIONS
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.studies.diagnose import Config, diagnose
from curvescope.train import TrainConfig, train

OUT = Path(__file__).parent / "results" / "diagnosis"
SEEDS, CALIBRATING = range(20), range(100, 106)
LAYERS, HEADS, WIDTH, LENGTH, VOCAB, COUNT = 3, 4, 24, 12, 16, 16
EFFORT = Config(
    engine="autograd", block_steps=0, num_probes=2, num_steps=8, num_shared=3, part_steps=4,
    num_sample_probes=2,
)  # fmt: skip
LLAMA = {
    "norm_kind": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
    "bias_qkv": False,
    "bias_o": False,
}
LARGE = "tiny-gpt"  # only for calibration, because it takes as long as all others together
DEEP = {"n_layers": 8, "d_model": 32, "d_ff": 64, "init": "xavier", "embed_std": 1.0, "activation": "relu"}

# ------------------------------------------------------------------------------------------------ healthy


def language(seed: int, count: int = COUNT) -> Batches:
    """Return sequences of one Markov chain; other seeds give further sequences."""
    options = {"length": LENGTH, "vocab": VOCAB, "concentration": 0.1, "seed": 0, "sample_seed": seed}
    return task_data("markov", num_sequences=count, batch_size=COUNT, **options)


def words(seed: int, count: int = COUNT) -> Batches:
    """Return a copying task, which heads learn by attending to one token each."""
    return task_data(
        "copy", num_sequences=count, length=LENGTH // 2, vocab=VOCAB - 1, seed=seed, batch_size=COUNT
    )


@cache
def fresh(seed: int, **settings: Any) -> Problem:
    """Return a model at its initialization."""
    shape = {"n_layers": LAYERS, "n_heads": HEADS, "d_model": WIDTH, "d_ff": 2 * WIDTH}
    cfg = cs.TransformerConfig(**{**shape, "n_ctx": LENGTH, "vocab_size": VOCAB, "seed": seed, **settings})
    return Problem(load(cs.Transformer(cfg)), language(seed))


@cache
def trained(
    seed: int, *, data: Callable[..., Batches] = language, steps: int = 100, lr: float = 3e-3, **settings: Any
) -> Problem:
    """Return the model after training with warm-up, on other sequences of the same chain."""
    batches = data(seed + 10_000, 16 * COUNT)
    cfg = TrainConfig(steps=steps, lr=lr, warmup=steps // 5)
    model, _, _ = train(fresh(seed, **settings).model, batches, cfg)
    return Problem(model, data(seed))


def bundled(seed: int) -> Problem:
    """Return the bundled model at one of its four checkpoints, on sequences of the bundled text."""
    model = load("tiny-gpt", revision=REVISIONS[seed % 4])
    return Problem(model, cs.text_data("sample", model, tokens=256, seq_len=32, batch_size=8, seed=seed))


COPYING: dict[str, Any] = {"data": words, "steps": 120, "lr": 1e-2, "n_layers": 2}
HEALTHY: dict[str, Callable[[int], Problem]] = {
    "fresh": fresh,
    "fresh, as Llama": lambda seed: fresh(seed, **LLAMA),
    "fresh, xavier": lambda seed: fresh(seed, init="xavier"),
    "fresh, tied, wide feed-forward": lambda seed: fresh(seed, tied=True, d_ff=8 * WIDTH),
    "fresh, 8 layers": lambda seed: fresh(seed, **DEEP),
    "trained": trained,
    "trained, as Llama": lambda seed: trained(seed, **LLAMA),
    "trained, post-norm": lambda seed: trained(seed, norm="post", init="xavier", embed_std=1.0),
    "trained to copy": lambda seed: trained(seed, **COPYING),
    LARGE: lambda seed: bundled(seed),
}

# ------------------------------------------------------------------------------------------------ planted


def base(seed: int) -> Problem:
    """Return a healthy model to plant faults in: trained for even seeds, fresh for odd seeds."""
    model = trained(seed) if seed % 2 == 0 else fresh(seed, init="xavier")
    return copied(model)


def copied(problem: Problem) -> Problem:
    """Return the model with its own copy of the weights."""
    model = replace(problem.model, module=copy.deepcopy(problem.model.module))
    return Problem(model, problem.batches)


def scaled(problem: Problem, factor: float, *fronts: str) -> Problem:
    """Multiply all parameters whose names begin with a prefix."""
    with torch.no_grad():
        for name, p in problem.model.named_parameters():
            if name.startswith(fronts):
                p.mul_(factor)
    return problem


def written(problem: Problem, name: str, value: float, rows: slice = slice(None)) -> Problem:
    """Set rows of a parameter to a value."""
    with torch.no_grad():
        problem.model.get_parameter(name)[rows] = value
    return problem


def with_inputs(problem: Problem, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Problem:
    """Replace the sequences."""
    batch = problem.batches[0]
    assert isinstance(batch.inputs, Tensor)
    inputs, targets = change(batch.inputs, batch.targets)
    return Problem(problem.model, Batches.from_tensors(inputs, targets, batch_size=COUNT, name="spoilt"))


def half_copies(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the first half."""
    return (torch.cat([t[: COUNT // 2]] * 2) for t in (x, y))  # pyright: ignore[reportReturnType]


def rubbish(seed: int) -> Problem:
    """Draw random targets for two sequences, for a model that copies."""
    source = torch.Generator().manual_seed(seed)

    def change(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, VOCAB, y[:2].shape, generator=source)
        return x, torch.cat([torch.where(y[:2] < 0, y[:2], drawn), y[2:]])

    return with_inputs(trained(seed, **COPYING), change)


def dead_head(seed: int) -> Problem:
    """Set the rows of W_O of one head to zero."""
    k, j = WIDTH // HEADS, seed % HEADS
    return written(base(seed), f"L{seed % LAYERS}.W_O", 0.0, slice(k * j, k * j + k))


PLANTED: dict[str, tuple[str, Callable[[int], Problem]]] = {  # the check that should find it
    "layer": ("uneven_layers", lambda seed: scaled(base(seed), 30.0, f"L{seed % LAYERS}.W_")),
    "saturated": (
        "saturated_attention",
        lambda seed: scaled(base(seed), 100.0, f"L{seed % LAYERS}.W_Q", f"L{seed % LAYERS}.W_K"),
    ),
    "post_norm": ("norm_placement", lambda seed: fresh(seed, **DEEP | {"n_layers": 12, "norm": "post"})),
    "copies": ("duplicates", lambda seed: with_inputs(base(seed), half_copies)),
    "rate": ("learning_rate", base),
    "dead_head": ("dead_heads", dead_head),
    "feed_forward": ("flat_blocks", lambda seed: written(base(seed), f"L{seed % LAYERS}.b_1", -100.0)),
    "embedding": ("embedding_scale", lambda seed: scaled(base(seed), 100.0, "E", "P")),
    "logits": ("confidence", lambda seed: scaled(base(seed), 30.0, "U")),
    "rubbish": ("steep_sequences", rubbish),
    "sink": ("sinks", base),
}
HOW = {"sink": AttentionChange(bias=8.0)}

# -------------------------------------------------------------------------------------------------- runs


@contextmanager
def as_planted(problem: Problem, case: str) -> Iterator[None]:
    """Apply the planted change during a measurement."""
    with changed_attention(problem.model, HOW[case]) if case in HOW else nullcontext():
        yield


def rate(problem: Problem) -> float:
    """Return twice the ceiling 2/λ_max, from a separate eigensolver."""
    result = cs.eigsh(Hessian(problem, engine="autograd"), 1, which="LA", tol=1e-2, vectors=False)
    return 2 * 2 / float(result.values[0])


def measure(kind: str, case: str, seed: int) -> dict[str, Any]:
    """Run one case: findings, all values, seconds of processor time."""
    clock = time.process_time()
    problem = HEALTHY[case](seed) if kind == "healthy" else PLANTED[case][1](seed)
    planting_time = time.process_time() - clock
    cfg = replace(EFFORT, lr=rate(problem) if case == "rate" else None, seed=seed)
    state: dict[str, Any] = {}
    with as_planted(problem, case):
        result = diagnose(problem, cfg, state=state)
        if kind == "healthy":  # also check half of the ceiling, from the same measurements
            half = result.sharpness.max_learning_rate / 2
            result = diagnose(problem, replace(cfg, lr=half), state=state)
    return {
        "kind": kind,
        "case": case,
        "seed": seed,
        "found": {check.name: check.severity for check in result.unusual},
        "values": {c.name: [rounded(c.value), rounded(c.error)] for c in result.checks if c.unit},
        "live": rounded(float(result.heads.liveness.mean(0).min())),
        "seconds": [round(planting_time, 2), round(time.process_time() - clock - planting_time, 2)],
    }


def rounded(value: float) -> float | None:
    """Round to four digits; return None for values that are not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def carry_out(file: Path, seeds: range, cases: list[tuple[str, str]]) -> None:
    """Return all cases that the file does not have yet."""
    rows = read(file)
    done = {(row["kind"], row["case"], row["seed"]) for row in rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for kind, case in cases:
            if (kind, case, seed) in done:
                continue
            row = measure(kind, case, seed)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{seed:4d} {kind} {case}: {row['found'] or 'nothing'} {row['seconds']}", flush=True)
        fresh.cache_clear()
        trained.cache_clear()


def read(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the file."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def main() -> None:
    """Measure the missing cases."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="healthy models of other seeds")
    parser.add_argument("--seeds", type=int, help="that many, to try it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = CALIBRATING if args.calibrate else SEEDS
    name = "calibration.jsonl" if args.calibrate else "validation.jsonl"
    healthy = [("healthy", case) for case in HEALTHY if args.calibrate or case != LARGE]
    planted = [] if args.calibrate else [("planted", case) for case in PLANTED]
    carry_out(OUT / name, seeds[: args.seeds], healthy + planted)


if __name__ == "__main__":
    main()
