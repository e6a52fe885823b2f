"""Does the diagnosis of a monitored run find planted causes, and does it leave healthy runs alone?

    OMP_NUM_THREADS=1 python benchmarks/monitor_diagnosis.py train      # all runs; resumes where it was
    OMP_NUM_THREADS=1 python benchmarks/monitor_diagnosis.py judge      # findings of every run, a line each
    OMP_NUM_THREADS=1 python benchmarks/monitor_diagnosis.py tables     # into docs/guides/unstable.md

`train` writes the history of each run as an archive in `runs/monitor_diagnosis`; `judge` reads these, so that
a rule can change without training again. GPTs have 3 layers, width 16, 200 steps, and learn a Markov chain.
Every planted cause has a control: the same seed without the cause, trained without a monitor. The loss shows
a cause from the first step on at which its mean over ten steps is above the control's by more than `SHOWN`.

Seeds 100 and following choose the limits (`CALIBRATING`), seeds 0 and following are reported.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _stored import GUIDES, put_table
from torch import Tensor
from torch.nn import functional as F

import curvescope as cs
from curvescope.data.tasks import task_data
from curvescope.monitor.diagnosis import diagnose_run
from curvescope.monitor.run_history import RunHistory

OUT = Path(__file__).parent / "results" / "monitor_diagnosis"
STORE = Path("runs") / "monitor_diagnosis"
SEEDS, CALIBRATING = range(20), range(100, 102)
STEPS, EVERY, LAYERS, WIDTH, LENGTH, VOCAB = 200, 25, 3, 16, 12, 16
GARBAGE_STEPS = range(110, 113)
LLAMA = {
    "norm_kind": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
    "bias_qkv": False,
    "bias_o": False,
}


@dataclass(frozen=True)
class Recipe:
    """Settings of a run; the defaults are healthy."""

    optimizer: str = "adamw"
    lr: float = 3e-3
    warmup: int = 20
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip: float | None = None
    cosine: bool = False
    batch: int = 16  # 0 is all data at once
    sequences: int = 512
    model: dict[str, Any] = field(default_factory=dict)
    scaled: float = 1.0  # times the matrices of one layer
    attention_rate: float = 1.0  # times the learning rate of W_Q and W_K
    half_moments: bool = False
    garbage: bool = False
    noise: float = 0.0  # share of the training labels that are drawn at random


HEALTHY: dict[str, Recipe] = {
    "AdamW": Recipe(),
    "AdamW, low rate, no warm-up": Recipe(lr=1e-3, warmup=0),
    "AdamW, high rate": Recipe(lr=1e-2),
    "AdamW, cosine, β₂ = 0.999": Recipe(lr=1e-2, cosine=True, beta2=0.999),
    "AdamW, clipped": Recipe(lr=1e-2, clip=1.0),
    "SGD with momentum": Recipe(optimizer="sgd", lr=0.1),
    "SGD, three times the rate": Recipe(optimizer="sgd", lr=0.3),
    "post-norm": Recipe(model={"norm": "post"}),
    "as Llama": Recipe(model=LLAMA),
    "batches of 4": Recipe(batch=4),
}

Control = Callable[[int], tuple[Recipe, Recipe]]
PLANTED: dict[str, tuple[str, Control]] = {  # the finding that names it; the recipe and its control of a seed
    "learning rate too high": (
        "learning_rate",
        lambda seed: (
            (Recipe(lr=0.3), Recipe())
            if seed % 2
            else (Recipe(optimizer="sgd", lr=1.0), Recipe(optimizer="sgd", lr=0.1))
        ),
    ),
    "no warm-up": ("no_warmup", lambda seed: (Recipe(lr=0.1, warmup=0), Recipe(lr=0.1, warmup=50))),
    "one layer scaled": ("scaled_layer", lambda seed: (Recipe(scaled=10.0), Recipe())),
    "attention logits grow": ("attention_logits", lambda seed: (Recipe(attention_rate=50.0), Recipe())),
    "bad initialization": (
        "initialization",
        lambda seed: (Recipe(model={"init_std": 1.0 if seed % 2 else 0.5}), Recipe()),
    ),
    "moments in bfloat16": (
        "moment_precision",
        lambda seed: (Recipe(half_moments=True, beta2=0.999), Recipe(beta2=0.999)),
    ),
    "batches of garbage": ("bad_batch", lambda seed: (Recipe(garbage=True, lr=1e-2), Recipe(lr=1e-2))),
    "too little weight decay": (
        "weight_growth",
        lambda seed: (
            Recipe(lr=3e-2, weight_decay=0.0, sequences=48),
            Recipe(lr=3e-2, weight_decay=1.0, sequences=48),
        ),
    ),
    "label noise": ("label_noise", lambda seed: (Recipe(noise=0.4), Recipe())),
}

# ----------------------------------------------------------------------------------------------- training


def data(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Sequences of one Markov chain; other seeds are other text of it."""
    options = {"length": LENGTH, "vocab": VOCAB, "concentration": 0.1, "seed": 0, "sample_seed": seed}
    batch = task_data("markov", num_sequences=count, batch_size=count, **options)[0]
    assert isinstance(batch.inputs, Tensor)
    return batch.inputs, batch.targets


def make_module(recipe: Recipe, seed: int) -> cs.Transformer:
    shape = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": 2, "n_ctx": LENGTH, "d_ff": 2 * WIDTH}
    module = cs.Transformer(
        cs.TransformerConfig(**{**shape, "vocab_size": VOCAB, "seed": seed, **recipe.model})
    )
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.startswith(f"L{seed % LAYERS}.W_"):
                p.mul_(recipe.scaled)
    return module


def make_optimizer(recipe: Recipe, module: cs.Transformer) -> torch.optim.Optimizer:
    """Two groups, the first of which has the queries and keys."""
    inside = [p for name, p in module.named_parameters() if name.endswith(("W_Q", "W_K"))]
    rest = [p for name, p in module.named_parameters() if not name.endswith(("W_Q", "W_K"))]
    groups = [{"params": inside, "factor": recipe.attention_rate}, {"params": rest, "factor": 1.0}]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)
    betas = (0.9, recipe.beta2)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=betas, weight_decay=recipe.weight_decay)


def rate(recipe: Recipe, step: int) -> float:
    rise = min(1.0, (step + 1) / max(recipe.warmup, 1))
    fall = 0.5 * (1 + math.cos(math.pi * step / STEPS)) if recipe.cosine else 1.0
    return recipe.lr * rise * fall


def take_step(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """A step whose moments are kept in bfloat16 between steps if the recipe says so."""
    moments = [state for state in optimizer.state.values() if "exp_avg" in state]
    if recipe.half_moments:
        for state in moments:
            state |= {name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}
    optimizer.step()
    if recipe.half_moments:
        for state in optimizer.state.values():
            state |= {name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")}


def train(recipe: Recipe, seed: int, *, watched: bool) -> dict[str, np.ndarray]:
    """Loss and gradient norm of every step, and what the monitor saw."""
    torch.manual_seed(seed)
    module = make_module(recipe, seed)
    optimizer = make_optimizer(recipe, module)
    inputs, targets = data(seed, recipe.sequences)
    drawn = torch.Generator().manual_seed(seed)
    wrong = torch.rand(targets.shape, generator=drawn) < recipe.noise
    targets = torch.where(wrong, torch.randint(VOCAB, targets.shape, generator=drawn), targets)
    probe = data(10_000 + seed, 16) if recipe.batch else (inputs, targets)
    monitor = None
    if watched:
        settings = {"top": 2, "tol": 0.05, "num_probes": 2, "max_products": 20, "blocks": False}
        monitor = cs.CurvatureMonitor(module, [probe], every=EVERY, budget=1.0, seed=seed, **settings)
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step) * group["factor"]
        chosen = torch.randint(len(inputs), (recipe.batch,), generator=drawn)
        chosen = chosen if recipe.batch else torch.arange(len(inputs))
        x, y = inputs[chosen], targets[chosen]
        if recipe.garbage and step in GARBAGE_STEPS:
            x, y = (torch.randint(VOCAB, t.shape, generator=drawn) for t in (x, y))
        loss = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.clip or math.inf)
        take_step(recipe, optimizer)
        losses.append(loss.item())
        norms.append(float(norm))
        if monitor is not None:
            monitor.step(step, optimizer=optimizer, loss=losses[-1])
        if not math.isfinite(losses[-1]):
            break
    found = {"loss": np.array(losses), "norm": np.array(norms)}
    return found | (arrays(monitor) if monitor is not None else {})


def arrays(monitor: cs.CurvatureMonitor) -> dict[str, np.ndarray]:
    """The history and the blocks of a monitor, by column."""
    seen = monitor.result()
    history = {f"history.{name}": values for name, values in seen.history.items()}
    return history | {f"blocks.{name}": values for name, values in seen.blocks.items()}


def all_runs(seeds: range) -> Iterator[tuple[str, str, int]]:
    """Kind, case and seed, one seed of all cases after the other."""
    for seed in seeds:
        yield from (("healthy", case, seed) for case in HEALTHY)
        yield from (("planted", case, seed) for case in PLANTED)


def store_of(kind: str, case: str, seed: int) -> Path:
    return STORE / f"{kind}-{case.replace(' ', '_').replace(',', '')}-{seed}.npz"


def control_loss(control: Recipe, seed: int) -> np.ndarray:
    """Loss of every step of a control; of one that is a healthy run, from its archive.

    A monitor does not change the training, so that run has the control's loss bit for bit.
    """
    for case, recipe in HEALTHY.items():
        path = store_of("healthy", case, seed)
        if recipe == control and path.exists():
            with np.load(path) as archive:
                return archive["loss"]
    return train(control, seed, watched=False)["loss"]


def make(kind: str, case: str, seed: int) -> None:
    """Train what is missing of one run."""
    path = store_of(kind, case, seed)
    if path.exists():
        return
    recipe, control = (HEALTHY[case], None) if kind == "healthy" else PLANTED[case][1](seed)
    found = train(recipe, seed, watched=True)
    if control is not None:
        found["control"] = control_loss(control, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **found)
    partial.replace(path)


# ------------------------------------------------------------------------------------------------ judging

CURVATURE = ("lambda_max", "sharpness", "lr_lambda_max", "lr_sharpness", "trace", "curvature_along_gradient")
SHOWN = 0.05  # of the control's loss, and three times the spread of the difference before
ALARMS = ("fault", "warning")


def read_history(found: dict[str, np.ndarray]) -> RunHistory:
    """The history of a stored run, with the loss of every step."""
    parts = [
        {k.partition(".")[2]: v for k, v in found.items() if k.startswith(front)}
        for front in ("history.", "blocks.")
    ]
    loss = found["loss"]
    return RunHistory(parts[0], parts[1], {"step": np.arange(len(loss), dtype=float), "loss": loss})


def without_curvature(history: RunHistory) -> RunHistory:
    """The same history without any column that took a product."""
    columns = {
        k: np.full_like(v, np.nan) if k.startswith(CURVATURE) else v for k, v in history.columns.items()
    }
    blocks = {k: v for k, v in history.blocks.items() if k in ("step", "block", "weight_norm")}
    return RunHistory(columns, blocks, history.steps)


def first_alarms(history: RunHistory) -> dict[str, int]:
    """The measurement at which each finding was made first, and stayed; as a person who looks on sees it."""
    since: dict[str, int] = {}
    for step in history.at:
        names = {f.name for f in diagnose_run(history.until(step)) if f.severity in ALARMS}
        since = {name: since.get(name, int(step)) for name in names}
    return since


@dataclass(frozen=True)
class Baseline:
    """Alarms from the loss and the gradient norm of every step alone.

    Spikes are those of the diagnosis itself; the limit of the norm was chosen on the calibrating seeds too.
    """

    norm: float = 6.0  # times the median of the last 20 steps: at most 5.5 in healthy runs
    first: float = 1.2  # first loss over log V
    fall: float = 0.97  # mean loss behind 100 steps over that of the first ten

    def alarm(self, found: dict[str, np.ndarray]) -> int | None:
        """The first step with an alarm."""
        loss, norm = found["loss"], found["norm"]
        spike = RunHistory({}, {}, read_history(found).steps).trouble.first
        for step in range(len(loss)):
            usual = slice(max(step - 20, 0), max(step, 1))
            far = step == spike or (step > 10 and norm[step] > self.norm * np.median(norm[usual]))
            wrong = step == 0 and loss[0] > self.first * math.log(VOCAB)
            flat = step == 100 and loss[90:100].mean() > self.fall * loss[:10].mean()
            if far or wrong or flat or not math.isfinite(loss[step]):
                return step
        return None


def shown(found: dict[str, np.ndarray]) -> int | None:
    """The first step from which the mean loss over ten steps stays above the control's."""
    loss, control = found["loss"], found["control"]
    count = min(len(loss), len(control))
    difference = np.nan_to_num(loss[:count], nan=np.inf) - control[:count]
    step = 0
    for step in range(count):
        near = slice(max(step - 9, 0), step + 1)
        beyond = difference[near].mean() > SHOWN * control[near].mean()
        if beyond and (step + 10 >= count or difference[step : step + 10].mean() > SHOWN * control[step]):
            return step
    return step if len(loss) < STEPS else None


def judge(kind: str, case: str, seed: int) -> dict[str, Any] | None:
    """Findings of one run with their steps, and those of the baseline; None if it was not trained."""
    path = store_of(kind, case, seed)
    if not path.exists():
        return None
    with np.load(path) as archive:
        found = dict(archive)
    history = read_history(found)
    last = [f for f in diagnose_run(history) if f.severity in ALARMS]
    row: dict[str, Any] = {
        "kind": kind,
        "case": case,
        "seed": seed,
        "found": [f.name for f in last],
        "since": first_alarms(history),
        "without_curvature": [
            f.name for f in diagnose_run(without_curvature(history)) if f.severity in ALARMS
        ],
        "baseline": Baseline().alarm(found),
    }
    if kind == "planted":
        row["shown"] = shown(found)
    return row


# ------------------------------------------------------------------------------------------------- tables


def read_rows(name: str) -> list[dict[str, Any]]:
    lines = (OUT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def planted_table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Found by name, found at all, without curvature, by the baseline, and both leads."""
    table: list[tuple[str, ...]] = [
        (
            "planted", "finding", "named", "named first", "any finding", "without curvature", "baseline",
            "loss shows it", "lead of the finding", "lead of the baseline",
        )
    ]  # fmt: skip
    for case, (name, _) in PLANTED.items():
        own = [row for row in rows if row["kind"] == "planted" and row["case"] == case]
        count = len(own)
        leads = [
            row["shown"] - row["since"][name]
            for row in own
            if name in row["since"] and row["shown"] is not None
        ]
        plain = [row["shown"] - row["baseline"] for row in own if None not in (row["baseline"], row["shown"])]
        table.append(
            (
                case,
                f"`{name}`",
                f"{sum(name in row['found'] for row in own)} of {count}",
                f"{sum(row['found'][:1] == [name] for row in own)}",
                f"{sum(bool(row['found']) for row in own)}",
                f"{sum(name in row['without_curvature'] for row in own)}",
                f"{sum(row['baseline'] is not None for row in own)}",
                f"{sum(row['shown'] is not None for row in own)}",
                _lead(leads),
                _lead(plain),
            )
        )
    return table


def _lead(leads: list[int]) -> str:
    """Median and range, in steps."""
    return f"{np.median(leads):.0f} ({min(leads)} to {max(leads)})" if leads else "–"


def healthy_table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    table = [("healthy", "false alarms", "of what", "of the baseline")]
    for case in [*HEALTHY, None]:
        own = [row for row in rows if row["kind"] == "healthy" and case in (None, row["case"])]
        names = sorted({f"`{name}`" for row in own for name in row["found"]})
        alarms, plain = (
            sum(bool(row["found"]) for row in own), sum(row["baseline"] is not None for row in own)
        )  # fmt: skip
        table.append(
            (case or "all", f"{alarms} of {len(own)}", ", ".join(names) or "–", f"{plain} of {len(own)}")
        )
    return table


def main() -> None:
    """Train, judge, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "judge", "tables"])
    parser.add_argument("--seeds", type=int, nargs=2, action="append", help="from, to; repeatable")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "tables":
        rows = read_rows("validation")
        put_table(GUIDES / "unstable.md", "planted", planted_table(rows))
        put_table(GUIDES / "unstable.md", "healthy", healthy_table(rows))
        return
    if asked.what == "judge":
        reported = range(*asked.seeds[0]) if asked.seeds else SEEDS
        for name, seeds in (("calibration", CALIBRATING), ("validation", reported)):
            found = [row for run in all_runs(seeds) if (row := judge(*run)) is not None]
            if not found:  # the runs of these seeds are not stored here
                continue
            OUT.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in found)
            (OUT / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return
    spans = [range(*span) for span in asked.seeds] if asked.seeds else [CALIBRATING, SEEDS]
    for kind, case, seed in (run for span in spans for run in all_runs(span)):
        make(kind, case, seed)
        print(seed, kind, case, flush=True)


if __name__ == "__main__":
    main()
