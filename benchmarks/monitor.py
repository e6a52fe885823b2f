"""The monitor at work: bits of training, share of the time, error of λ_max, products warm against cold.

    python benchmarks/monitor.py [--case small|tiny-gpt|gpt360k|stories15M] [--device cuda] [--out FOLDER]

- bits: the same training twice without a monitor and once with it, weights and random states compared bit for
  bit: `control` says whether training itself comes out the same twice;
- share: a run with the budget of 10 %, the share of the time that measuring took at its end, and the largest
  after the first measurement had been waited for;
- rows (gpt360k alone): 300 steps of a GPT of 360,000 parameters at budget=0.1 with training batches of
  several sizes: how many rows of λ_max and sharpness there are, what errors they state, whether these hold
  against `eigsh` (tol 1e-4) on the same weights, products of the first row, and the share after 100 steps;
- accuracy: a run that is measured at every due step; there λ_max is compared with `eigsh` (tol 1e-4), and the
  call with that of a monitor that sees the model for the first time.

`stories15M` is a Llama of 15 million parameters (288 wide, 6 layers, 32000 tokens), from fresh weights, on
the bytes of the sample text. On a GPU, bits are compared with PyTorch's deterministic algorithms.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvescope as cs
from curvescope.monitor.measurement import Effort, Measurement
from curvescope.monitor.memory import Memory
from curvescope.monitor.monitor import VERIFY
from curvescope.runs.folder import environment


class Case(NamedTuple):
    """A model, its probe batches, and a stream of training batches."""

    module: nn.Module
    probe: list[tuple[Tensor, Tensor]]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    lr: float
    every: int


def sample_ids(device: str) -> Tensor:
    text = (Path(cs.__file__).parent / "assets" / "sample.txt").read_bytes()
    return torch.tensor(list(text), device=device)


def stream(ids: Tensor, rows: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Windows of the text, drawn by PyTorch's global generator, as training loops do."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(ids) - length - 1, (rows,)).tolist()
        found = torch.stack([ids[s : s + length + 1] for s in starts])
        return found[:, :-1], found[:, 1:]

    return batch


def make_case(name: str, device: str) -> Case:
    torch.manual_seed(0)
    ids = sample_ids(device)
    if name == "small":
        config = cs.TransformerConfig(n_layers=2, d_model=16, n_heads=2, n_ctx=16, vocab_size=256, d_ff=32)
        module, rows, length, lr, every = cs.Transformer(config), 8, 16, 1e-3, 20
    elif name == "tiny-gpt":
        model = cs.load("tiny-gpt")
        module, rows, length, lr, every = model.module, 8, 32, 3e-4, 20
        windows = cs.text_data("sample", model, tokens=20000, seq_len=100)
        ids = torch.cat([window.inputs.flatten() for window in windows]).to(device)
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6,
            vocab_size=32000, max_position_embeddings=256, tie_word_embeddings=True,
        )  # fmt: skip
        module, rows, length, lr, every = LlamaForCausalLM(config), 32, 256, 5e-4, 50
    module = module.to(device)
    batch = stream(ids, rows, length)
    inputs, targets = batch(0)
    few = max(1, rows // 4)
    return Case(module, [(inputs[:few], targets[:few])], batch, lr, every)


def train(case: Case, steps: int, seen: Callable[[int, Any], None] | None = None) -> dict[str, Tensor]:
    """Weights behind so many steps of AdamW, all random sources seeded."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    module = case.module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=case.lr)
    for step in range(steps):
        inputs, targets = case.batch(step)
        outputs = module(inputs)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if seen is not None:
            seen(step, optimizer)
    return {name: t.clone() for name, t in module.state_dict().items()}


def random_states(device: str) -> list[Any]:
    gpu = torch.cuda.get_rng_state().tolist() if device == "cuda" else []
    numbers = np.random.get_state()[1]
    return [random.getstate(), numbers.tolist(), torch.get_rng_state().tolist(), gpu]


def bits(case: Case, device: str, steps: int) -> dict[str, Any]:
    """Weights and random states of two runs alone, the control, and of a third with a monitor.

    With attention in plain products: the backward of the fused kernels adds up in any order.
    """
    found, states, rows = [], [], 0
    for watched in (False, False, True):
        one = case._replace(module=copy.deepcopy(case.module))
        monitor = cs.CurvatureMonitor(
            one.module, one.probe, every=max(steps // 2, 1), budget=1.0, blocks=False
        )
        seen = (lambda step, o, m=monitor: m.step(step, optimizer=o)) if watched else None
        with sdpa_kernel(SDPBackend.MATH):
            found.append(train(one, steps, seen))
        states.append(random_states(device))
        rows = len(monitor.history)

    def same(other: int) -> dict[str, bool]:
        weights = all(torch.equal(found[0][name], found[other][name]) for name in found[0])
        return {"weights": weights, "random_states": states[0] == states[other]}

    return {"steps": steps, "measurements": rows, "control": same(1), **same(2)}


def share(case: Case, steps: int, seconds: float) -> dict[str, Any]:
    """Until the steps are done, or the time is over."""
    one = case._replace(module=copy.deepcopy(case.module))
    monitor = cs.CurvatureMonitor(one.module, one.probe, every=case.every, budget=0.1)
    begun, last = time.perf_counter(), [0]

    class Over(Exception):
        pass

    def seen(step: int, optimizer: Any) -> None:
        monitor.step(step, optimizer=optimizer)
        last[0] = step + 1
        if time.perf_counter() - begun > seconds:
            raise Over

    with suppress(Over):
        train(one, steps, seen)
    history, whole = monitor.history, time.perf_counter() - begun
    return {
        "steps": last[0],
        "seconds": whole,
        "measurements": len(history),
        "share_at_the_end": float(history["cost_seconds"].sum()) / whole,
        "largest_share_behind_a_later_measurement": float(history["share"][1:].max()),
        "first_measurement_seconds": float(history["cost_seconds"][0]),
        "later_measurement_seconds": history["cost_seconds"][1:].round(3).tolist(),
        "left_out": history["left_out"].tolist(),
        "blocks_seen": int(monitor.blocks["lambda_max"].notna().sum()),
    }


def searched(problem: cs.Problem, memory: Memory, call: int, *, verify: bool) -> tuple[int, float]:
    """Products of the search for both ends of the spectrum, and its λ_max."""
    effort = Effort(top=3, tol=0.01, num_probes=4, max_products=60, seed=0)
    measurement = Measurement(problem, memory, effort, call)
    with measurement.H.frozen():
        measurement.top(None)
        measurement.ends()
        if verify:
            measurement.verify()
    return measurement.products, measurement.numbers["lambda_max"]


def accuracy(case: Case, measurements: int) -> dict[str, Any]:
    one = case._replace(module=copy.deepcopy(case.module))
    options = {"every": case.every, "budget": 1.0, "blocks": False}
    monitor = cs.CurvatureMonitor(one.module, one.probe, **options)
    memory, rows = Memory(), list[dict[str, float]]()

    def seen(step: int, optimizer: Any) -> None:
        row = monitor.step(step, optimizer=optimizer)
        if row is None:
            return
        cold = cs.CurvatureMonitor(one.module, one.probe, **options).measure(step, optimizer)
        one.module.eval()
        problem = cs.Problem(one.module, one.probe)
        searches = {
            "search": searched(problem, memory, len(rows), verify=False),
            "cold_search": searched(problem, Memory(), len(rows), verify=True),
            "cold_search_unverified": searched(problem, Memory(), len(rows), verify=False),
        }
        true = cs.eigsh(cs.Hessian(problem), 1, tol=1e-4)
        low = float(cs.eigsh(cs.Hessian(problem), 1, which="SA", tol=1e-3).values[0])
        one.module.train()
        top = float(true.values[0])
        rows.append(
            {
                "step": step,
                "lambda_max": row["lambda_max"],
                "relative_error": abs(row["lambda_max"] / top - 1),
                "stated_error": row["lambda_max_error"] / top,
                "lambda_min_error": abs(row["lambda_min"] - low) / top,
                "lambda_min_stated_error": row["lambda_min_error"] / top,
                "overlap": row.get("overlap", float("nan")),
                "products": row["products"],
                "cold_products": cold["products"],
                "seconds": row["cost_seconds"],
                "cold_seconds": cold["cost_seconds"],
                **{f"{name}_products": count for name, (count, _) in searches.items()},
                "search_error": abs(searches["search"][1] / top - 1),
                "eigsh_products": true.num_products,
                "eigsh_converged": float(true.converged),
            }
        )
        print(rows[-1], flush=True)

    train(one, (measurements - 1) * case.every + 1, seen)
    errors = [row["relative_error"] for row in rows]
    warm = [row for i, row in enumerate(rows) if i % VERIFY]

    def over(name: str, other: str) -> dict[str, float]:
        ratios = [row[name] / row[other] for row in warm]
        return {"median": float(np.median(ratios)), "largest": max(ratios)}

    return {
        "largest_error": max(errors),
        "median_error": float(np.median(errors)),
        "call_products_warm_over_cold": over("products", "cold_products"),
        "call_seconds_warm_over_cold": over("seconds", "cold_seconds"),
        "search_products_warm_over_cold": over("search_products", "cold_search_products"),
        "search_products_warm_over_unverified": over("search_products", "cold_search_unverified_products"),
        "rows": rows,
    }


class Paused:
    """Time of this process that is not spent on checking the monitor."""

    def __init__(self) -> None:
        self.out = 0.0

    def __call__(self) -> float:
        return time.process_time() - self.out

    def check(self, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = work()
        self.out += time.process_time() - start
        return found


def rows_of_a_run(sequences: int, probe: int, *, every: int = 10, steps: int = 300, lr: float = 1e-3) -> Any:
    """Train a GPT of 360,000 parameters, and compare every row with the converged numbers.

    The clock is the time of the process without the comparisons.
    """
    torch.manual_seed(0)
    config = cs.TransformerConfig(n_layers=4, d_model=80, n_heads=4, n_ctx=64, vocab_size=256, d_ff=320)
    module = cs.Transformer(config)
    batch = stream(sample_ids("cpu"), sequences, 64)
    inputs, targets = stream(sample_ids("cpu"), probe, 64)(0)
    optimizer, clock = torch.optim.AdamW(module.parameters(), lr=lr), Paused()
    monitor = cs.CurvatureMonitor(module, [(inputs, targets)], every=every, budget=0.1, clock=clock)
    rows, shares = list[dict[str, float]](), []

    def true() -> tuple[float, float]:
        states = torch.get_rng_state()
        H = cs.Hessian(cs.Problem(module.eval(), [(inputs, targets)]))
        top = cs.eigsh(H, 1, which="LA", tol=1e-4).values[0]
        seen = cs.preconditioned_sharpness(H, optimizer, tol=1e-4).value
        module.train()
        torch.set_rng_state(states)
        return float(top), float(seen)

    for step in range(steps):
        x, y = batch(step)
        loss = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        row = monitor.step(step, optimizer=optimizer, loss=loss)
        shares.append(monitor._budget.share)
        if row is None:
            continue
        top, seen = clock.check(true)
        rows.append({"step": step, "products": row["products"], "seconds": row["cost_seconds"]})
        rows[-1]["bounded"] = row["bounded"]
        for name, converged in (("lambda_max", top), ("sharpness", seen)):
            error = abs(row[name] - converged)
            rows[-1] |= {
                f"{name}_stated": row[f"{name}_error"] / row[name],
                f"{name}_error": error / converged,
                f"{name}_holds": float(error <= row[f"{name}_error"] + 1e-3 * converged),
            }
        rows[-1]["parts_left_out"] = len(str(monitor.history["left_out"].iloc[-1]).split())
        print(rows[-1], flush=True)
    both = ("lambda_max", "sharpness")
    good = [all(row[f"{name}_stated"] < 0.05 for name in both) for row in rows]
    return {
        "sequences": sequences,
        "probe_sequences": probe,
        "rows": len(rows),
        "rows_with_both_stated_below_5_percent": sum(good),
        "stated_errors_that_hold": float(np.mean([row[f"{n}_holds"] for row in rows for n in both])),
        "first_row_step": rows[0]["step"],
        "first_row_products": rows[0]["products"],
        "share_after_100_steps": shares[99],
        "largest_share_after_100_steps": max(shares[99:]),
        "training_step_seconds": monitor._budget.step_seconds,
        "notes": monitor.notes,
        "each": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="small", choices=["small", "tiny-gpt", "gpt360k", "stories15M"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100_000, help="of the run with a budget")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the run with a budget, at most")
    parser.add_argument("--measurements", type=int, default=8)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[128, 64, 32], help="in a training batch of gpt360k"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "monitor")
    asked = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the GPU is first used
    if asked.case == "gpt360k":
        torch.set_num_threads(1)
        runs = []
        for sequences in asked.sequences:
            runs.append(rows_of_a_run(sequences, probe=4))
            found = {"case": asked.case, "environment": environment(), "runs": runs}
            (asked.out / "gpt360k-cpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        return
    case = make_case(asked.case, asked.device)
    count = sum(p.numel() for p in case.module.parameters())
    found: dict[str, Any] = {"case": asked.case, "parameters": count, "environment": environment()}
    found["accuracy"] = accuracy(case, asked.measurements)
    found["share"] = share(case, asked.steps, asked.seconds)
    if asked.device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    found["bits"] = bits(case, asked.device, 10)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{asked.case}-{'cpu' if asked.device == 'cpu' else 'gpu'}.json"
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print({key: found[key] for key in ("bits", "share")}, path)


if __name__ == "__main__":
    main()
