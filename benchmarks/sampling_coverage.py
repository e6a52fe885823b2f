"""Count how often sampling intervals hold, over 300 samples from a population whose numbers are known.

    python benchmarks/sampling_coverage.py [--repeats 300]

Two populations have unlimited data: sequences of a Markov chain, for a model of width 16 that was trained
on the chain, and sequences that tiny-gpt draws from itself. The Hessian and the GGN of every sequence are
written out once for some blocks. A repeat draws sequences from the population, independently, and measures
the trace, the Frobenius norm (8 probes each), the extreme eigenvalues and the order of the blocks, with the
functions that the studies use; products with written-out matrices stand for those of the operators.

An interval holds if it contains the mean of the number over samples of that size, which is taken over
`TRUTH` further samples. A verdict is right as `is_right` says. Every case is stored when it is done, so that
a run that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvescope as cs
from curvescope.core.operator import Matrix
from curvescope.sampling import Sampled, Split, extremes, log_ratio, norm_of, rank, trace_of
from curvescope.sampling.errors import Measured
from curvescope.sampling.groups import MOST_GROUPS
from curvescope.train import TrainConfig, train

RESULTS = Path(__file__).parent / "results" / "sampling-coverage"
SIZES = (8, 32, 128)  # sequences of a sample
POPULATION = 512  # sequences that samples are drawn from
TRUTH = 400  # samples that the mean of a number is taken over
NUM_PROBES = 8
REPEATS = 300
PRECISION = 0.1
TREND = 0.02  # relative change to unlimited data from which a number is truly falling or rising
LENGTH = 16
BLOCKS = {
    "markov": ("L0.h0.W_Q", "L0.h0.W_V", "L0.b_1"),
    "tiny-gpt": ("L3.ln1.g", "L3.b_V", "ln_f.g"),
}


def population(name: str) -> cs.Problem:
    """A model, and sequences that are as good as unlimited."""
    if name == "markov":
        options = {"length": LENGTH, "vocab": 8, "seed": 0}
        shape = cs.TransformerConfig(n_layers=1, d_model=16, n_heads=2, d_ff=16, n_ctx=LENGTH, vocab_size=8)
        torch.manual_seed(0)
        fresh = cs.load(cs.Transformer(shape))
        data = cs.task_data("markov", num_sequences=512, sample_seed=1, **options)
        model, _, _ = train(fresh, data, TrainConfig(steps=300, lr=1e-2))
        return cs.Problem(model, cs.task_data("markov", num_sequences=POPULATION, sample_seed=2, **options))
    model = cs.load("tiny-gpt")
    return cs.Problem(model, own_sequences(model, POPULATION))


def own_sequences(model: Any, count: int) -> cs.Batches:
    """Sequences that a language model draws from itself, after a first token of its sample text."""
    text = cs.text_data("sample", model, tokens=count, seq_len=1)
    tokens = torch.cat([batch.inputs for batch in text])[:count]
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _ in range(LENGTH):
            p = model.module(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=source)], dim=1)
    return cs.Batches.from_tensors(tokens[:, :-1], tokens[:, 1:], batch_size=64, name="own samples")


def matrices(problem: cs.Problem, block: str, part: str) -> Tensor:
    """The Hessian or GGN of every sequence, (S, n, n), symmetric."""
    samples = cs.per_sample(problem, block)
    found = samples.products(torch.eye(samples.space.size), part)  # pyright: ignore[reportArgumentType]
    return ((found + found.mT) / 2).double()


def split_of(A: Tensor, numbers: np.ndarray, *, psd: bool) -> Split:
    """A sample of sequences of equal length, in groups as `split_sample` makes them."""
    G = min(MOST_GROUPS, len(numbers))
    members = [numbers[len(numbers) * g // G : len(numbers) * (g + 1) // G] for g in range(G)]
    means = torch.stack([A[rows].mean(0) for rows in members])
    w = np.array([len(rows) for rows in members], dtype=float)

    def matrix(M: Tensor) -> Matrix:
        return Matrix(M, symmetric=True, psd=psd)

    def unite(chosen: Any) -> Matrix:
        some = torch.as_tensor(w[list(chosen)] / w[list(chosen)].sum())
        return matrix(torch.einsum("g,gij->ij", some, means[list(chosen)]))

    return Split(unite(range(G)), [matrix(M) for M in means], w, unite, num_terms=float(len(numbers)))


def measured(A: Tensor, numbers: np.ndarray, source: np.random.Generator, *, psd: bool) -> dict[str, Sampled]:
    """Compute every number of one block on one sample."""
    split = split_of(A, numbers, psd=psd)
    V = torch.as_tensor(source.choice([-1.0, 1.0], size=(A.shape[1], NUM_PROBES)))
    forms, grams = split.forms_and_grams(V)
    _values, vectors = torch.linalg.eigh(split.op.to_dense())
    ends = extremes(split, vectors[:, [-1, 0]], np.zeros(2))
    found = {"trace": trace_of(split, forms), "norm": norm_of(split, grams), "lambda_max": ends["largest"]}
    return found if psd else found | {"lambda_min": ends["smallest"]}


def exact(M: Tensor) -> dict[str, float]:
    """The numbers of a matrix."""
    values = torch.linalg.eigvalsh(M)
    return {
        "trace": float(values.sum()), "norm": float(values.norm()), "lambda_max": float(values[-1]),
        "lambda_min": float(values[0]),
    }  # fmt: skip


def is_right(number: Sampled, unlimited: float, typical: float) -> bool:
    """Return True if the verdict is right.

    "settled to 10 %" is right if the value is within 10 % of that on unlimited data or of the mean at this
    size; "still falling" and "still rising" if the mean at this size is above or below that on unlimited data
    by more than 2 %; a spread over other data of this size claims no trend and is right if the interval holds
    the mean.
    """
    verdict = number.verdict(PRECISION)
    change = (typical - unlimited) / abs(typical) * math.copysign(1, typical)
    if verdict.startswith("settled"):
        return abs(number.value - unlimited) <= PRECISION * abs(unlimited)
    if "falling" in verdict:
        return change > TREND
    if "rising" in verdict:
        return change < -TREND
    return number.low <= typical <= number.high


def run_case(pool: dict[str, Tensor], size: int, repeats: int, *, psd: bool, seed: int) -> dict[str, Any]:
    """All repeats at one size: how often intervals hold, what verdicts say, how sure orders are."""
    source = np.random.default_rng([seed, size])
    S = len(next(iter(pool.values())))
    draws = [source.integers(S, size=size) for _ in range(TRUTH)]
    truth = {
        block: {
            name: float(np.mean(values))
            for name, values in _columns([exact(A[rows].mean(0)) for rows in draws]).items()
        }
        for block, A in pool.items()
    }
    unlimited = {block: exact(A.mean(0)) for block, A in pool.items()}
    each: list[dict[str, dict[str, Sampled]]] = []
    for _ in range(repeats):
        numbers = source.integers(S, size=size)
        each.append({block: measured(A, numbers, source, psd=psd) for block, A in pool.items()})
    rows = []
    for block in pool:
        for name in each[0][block]:
            found = [one[block][name] for one in each]
            mean = truth[block][name]
            verdicts = [number.verdict(PRECISION) for number in found]
            rows.append({
                "block": block, "quantity": name, "mean": mean, "unlimited": unlimited[block][name],
                "held": float(np.mean([n.low <= mean <= n.high for n in found])),
                "sampling_over_true": float(
                    np.median([math.hypot(n.sampling, n.numerical) for n in found])
                    / np.std([n.value for n in found])
                ),
                "right": float(np.mean([is_right(n, unlimited[block][name], mean) for n in found])),
                "settled": float(np.mean([v.startswith("settled") for v in verdicts])),
                "trend": float(np.mean(["falling" in v or "rising" in v for v in verdicts])),
            })  # fmt: skip
    return {"rows": rows, "orders": _orders(each, truth, draws, pool)}


def _columns(rows: list[dict[str, float]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _orders(
    each: list[dict[str, dict[str, Sampled]]],
    truth: dict[str, dict[str, float]],
    draws: list[np.ndarray],
    pool: dict[str, Tensor],
) -> list[dict[str, Any]]:
    """Count for every quantity the intervals of log ratios of pairs of blocks, and first places."""
    values = {block: _columns([exact(A[rows].mean(0)) for rows in draws]) for block, A in pool.items()}
    names = [n for n in ("lambda_max", "norm", "trace") if all((values[b][n] > 0).all() for b in pool)]
    names = [n for n in names if all(one[b][n].value > 0 for one in each for b in pool)]
    logs = {block: {name: np.log(values[block][name]) for name in names} for block in pool}
    found = []
    for name in names:
        held = []
        for a, b in combinations(truth, 2):
            ratio = float(np.mean(logs[a][name] - logs[b][name]))
            ends = [log_ratio(one[a][name], one[b][name]) for one in each]
            held.append(float(np.mean([low <= ratio <= high for _, low, high in ends])))
        orders = [rank({block: one[block][name] for block in truth}) for one in each]
        first = max(truth, key=lambda block: truth[block][name])
        sure = [o.names[0] == first for o in orders if o.certain]
        named = [first in (o.names[0], *o.rivals) for o in orders]
        found.append({
            "quantity": name, "held_mean": float(np.mean(held)), "held_least": min(held),
            "certain": float(np.mean([o.certain for o in orders])),
            "certain_right": float(np.mean(sure)) if sure else None, "first_named": float(np.mean(named)),
        })  # fmt: skip
    return found


def table(results: dict[str, Any]) -> list[str]:
    """Coverage by population, size and quantity: mean over blocks, least and most."""
    lines = [
        "| population | matrix | sequences | quantity | held (mean) | least | most | verdict right "
        "| settled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, case in results.items():
        name, part, size = key.split("/")
        for quantity in dict.fromkeys(row["quantity"] for row in case["rows"]):
            rows = [row for row in case["rows"] if row["quantity"] == quantity]
            held = [row["held"] for row in rows]
            right, settled = (float(np.mean([row[k] for row in rows])) for k in ("right", "settled"))
            lines.append(
                f"| {name} | {part} | {size} | {quantity} | {np.mean(held):.3f} | {min(held):.3f} | "
                f"{max(held):.3f} | {right:.3f} | {settled:.2f} |"
            )
    lines += ["", "Order of blocks: the interval of log ratios of pairs, and the first place.", ""]
    lines += [
        "| population | matrix | sequences | quantity | ratio held (mean) | least | first place certain | "
        "and right | first is named |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, case in results.items():
        name, part, size = key.split("/")
        for o in case["orders"]:
            right = "–" if o["certain_right"] is None else f"{o['certain_right']:.3f}"
            lines.append(
                f"| {name} | {part} | {size} | {o['quantity']} | {o['held_mean']:.3f} | "
                f"{o['held_least']:.3f} | "
                f"{o['certain']:.2f} | {right} | {o['first_named']:.3f} |"
            )
    return lines


def unequal_lengths(source: np.random.Generator, length: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of single sequences, with a mean of 3, and the sequences' lengths."""
    noise, normal = source.normal(size=size), source.normal(size=size)
    if length == "1 to 64":
        return 3 + noise, source.integers(1, 65, size=size).astype(float)
    if length == "one in ten is 100 times longer":
        return 3 + noise, np.where(source.random(size) < 0.1, 100.0, 1.0)
    spread = 2.0 if length == "log-normal, spread 2" else 1.0
    return 3 + noise, np.exp(spread * normal)


def unequal_table(repeats: int) -> list[str]:
    """Coverage for a number that is linear in the data if sequences have unequal lengths."""
    lengths = ("1 to 64", "log-normal, spread 1", "log-normal, spread 2", "one in ten is 100 times longer")
    sizes, unit = (2, 4, 8, 32), Matrix(torch.eye(1), symmetric=True)
    lines = [f"| lengths | {' | '.join(f'{size} sequences' for size in sizes)} |", "|---" * 5 + "|"]
    for length in lengths:
        shares = []
        for size in sizes:
            source, held = np.random.default_rng(size), 0
            for _ in range(repeats):
                values, w = unequal_lengths(source, length, size)
                G = min(MOST_GROUPS, size)
                edges = [size * g // G for g in range(G)]
                weights = np.add.reduceat(w, edges)
                means = np.add.reduceat(w * values, edges) / weights
                split = Split(unit, [unit] * G, weights, lambda _: unit)
                known = Measured(float(means @ split.weights), 0.0, 0)
                number = trace_of(split, means[None], measured=known)
                held += number.low <= 3.0 <= number.high
            shares.append(f"{held / repeats:.3f}")
        lines.append(f"| {length} | {' | '.join(shares)} |")
    return lines


def trend_table(results: dict[str, Any]) -> list[str]:
    """Verdicts "still falling" and "still rising": how many, and the least share of them that is right.

    A stored row has the share of trend verdicts and of right verdicts of any kind, so at most
    min(trend, 1 − right) are wrong trend verdicts.
    """
    lines = [
        "| quantity | verdicts of a trend | right, at least | cases below 19 of 20 |",
        "|---|---|---|---|",
    ]
    for quantity in ("norm", "lambda_max", "lambda_min"):
        claimed = wrong = 0.0
        below = []
        for key, case in results.items():
            for row in (row for row in case["rows"] if row["quantity"] == quantity and row["trend"]):
                most_wrong = min(row["trend"], 1 - row["right"])
                claimed, wrong = claimed + row["trend"], wrong + most_wrong
                if most_wrong > 0.05 * row["trend"]:
                    below.append(f"{key} {row['block']}")
        shown = ", ".join(below) or "none"
        lines.append(f"| {quantity} | {REPEATS * claimed:,.0f} | {1 - wrong / claimed:.3f} | {shown} |")
    return lines


def main() -> None:
    """Run the cases that are not stored, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", choices=list(BLOCKS), help="one population; without it, all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, blocks in BLOCKS.items():
        todo = [case for case in _cases(args.out, name) if not case[2].exists()]
        if not todo or args.only not in (None, name):
            continue
        problem = population(name)
        for part in dict.fromkeys(part for part, _, _ in todo):
            pool = {block: matrices(problem, block, part) for block in blocks}
            for _, size, file in [case for case in todo if case[0] == part]:
                found = run_case(pool, size, args.repeats, psd=part == "ggn", seed=len(part))
                file.write_text(json.dumps(found, indent=1) + "\n")
                print(file.name, flush=True)
    files = {f"{name}/{part}/{size}": f for name in BLOCKS for part, size, f in _cases(args.out, name)}
    results = {key: json.loads(file.read_text()) for key, file in files.items() if file.exists()}
    lines = [f"{args.repeats} samples of each size, drawn from {POPULATION} sequences.", "", *table(results)]
    unequal = unequal_table(10 * args.repeats)
    lines += ["", f"Sequences of unequal length, {10 * args.repeats:,} samples each.", "", *unequal]
    lines += ["", "Verdicts of a trend, from the stored shares of verdicts.", "", *trend_table(results)]
    (args.out / "README.md").write_text("\n".join(["# Coverage of sampling intervals", "", *lines]) + "\n")


def _cases(out: Path, name: str) -> list[tuple[str, int, Path]]:
    """Part, size and file of every case of a population."""
    return [(part, size, out / f"{name}-{part}-{size}.json") for part in ("hessian", "ggn") for size in SIZES]


if __name__ == "__main__":
    main()
