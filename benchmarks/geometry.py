"""Decode heads into tokens: low-rank SVD and chunked top-k against full SVDs and full sorts, at GPT-2's size.

Twelve heads of width 64 in a stream of width 768, 50,257 tokens, random weights. Ours decodes every singular
direction of W_QK and W_VO, both signs, the five best tokens of each. The other method is that of the
Traveling Words code: a 768 × 768 SVD per head and matrix, and a full sort of the vocabulary for all 768
vectors on each side, for the stronger sign only. It takes minutes, so each round times one head and
multiplies by twelve. One run times both methods in turn.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _timing import Ratio, arguments, peak_memory, short, state, table, write
from torch import Tensor

import curvescope as cs
from curvescope.geometry import HeadDirections, decode_heads
from curvescope.studies import traveling_words

K = 5
FULL = {"d_model": 768, "n_heads": 12, "vocab_size": 50257}
SMALL = {"d_model": 192, "n_heads": 3, "vocab_size": 5000}
ASKED = {"seconds": 20.0, "ratio": 10.0}


def block(sizes: dict[str, int]) -> cs.Model:
    """Return one block with random weights, biases and gains, and a tied embedding."""
    config = cs.TransformerConfig(n_layers=1, d_ff=0, n_ctx=8, tied=True, seed=0, **sizes)
    module = cs.Transformer(config)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1:
                p += 0.1 * torch.randn(p.shape, generator=source)
            elif name == "E":
                p.copy_(0.14 * torch.randn(p.shape, generator=source))
    return cs.load(module)


class Original:
    """Our own version of the Traveling Words method: full SVDs, full sorts, one side."""

    def __init__(self, model: cs.Model):
        p = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
        self.E, self.d, self.h = p["E"], model.facts["d_model"], model.facts["d_head"]
        gain, shift = p["L0.ln1.g"], p["L0.ln1.b"]
        self.N = torch.nn.functional.layer_norm(self.E, (self.d,), gain, shift)
        self.weights = [p[f"L0.W_{x}"] for x in "QKV"]
        self.W_O = p["L0.W_O"]

    def head(self, i: int) -> dict[str, Tensor]:
        """Return the five nearest tokens of every singular vector of one head: (d, 5) each."""
        columns = slice(i * self.h, (i + 1) * self.h)
        Q, K, V = (W[:, columns] for W in self.weights)
        pairs = {"qk": (Q @ K.T / self.h**0.5, self.N), "vo": (V @ self.W_O[columns], self.E)}
        tokens = {}
        for name, (matrix, right) in pairs.items():
            U, S, Vh = torch.linalg.svd(matrix)
            scores = Vh @ right.T
            sign = torch.where(scores.amax(1) >= -scores.amin(1), 1.0, -1.0)[:, None]
            del scores
            tokens[f"{name} left"] = self.nearest(sign * (U * S).T, self.N)
            tokens[f"{name} right"] = self.nearest(sign * Vh, right)
        return tokens

    def nearest(self, vectors: Tensor, rows: Tensor) -> Tensor:
        return (vectors @ rows.T).argsort(dim=1, descending=True)[:, :K]


def seconds(call: Any) -> tuple[Any, float, float]:
    """Return a call's result, its wall-clock seconds, and its processor seconds."""
    start, busy = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - start, time.process_time() - busy


def agreement(ours: HeadDirections, theirs: dict[str, Tensor], i: int) -> float:
    """Return the share of head i's directions, within the rank, with the same five tokens in both methods."""
    same = total = 0
    for name, part in (("qk", ours.qk), ("vo", ours.vo)):
        rows = part.head == i
        for side, top in (("left", part.left), ("right", part.right)):
            mine = torch.from_numpy(top.ids[rows, 0])
            other = theirs[f"{name} {side}"][: len(mine)]
            same += int((mine == other).all(1).sum())
            total += len(mine)
    return same / total


def measure(model: cs.Model, *, rounds: int) -> dict[str, Any]:
    """Return the seconds of both methods per round, and whether they find the same tokens."""
    original, num_heads = Original(model), model.facts["n_heads"]
    decode_heads(model, 0, k=1, num=1)  # do not measure what the first call loads
    theirs = decode_heads(model, 0, k=K, num=None, **traveling_words.DIRECTIONS)
    times: dict[str, list[float]] = {"ours_s": [], "ours_cpu_s": [], "original_s": [], "original_cpu_s": []}
    same = []
    for i in range(rounds):
        _, *our_time = seconds(lambda: decode_heads(model, 0, k=K, num=None))
        tokens, *original_time = seconds(lambda i=i: original.head(i))
        for name, value in zip(times, [*our_time, *(num_heads * t for t in original_time)], strict=True):
            times[name].append(value)
        same.append(agreement(theirs, tokens, i))
    _, memory = peak_memory(lambda: decode_heads(model, 0, k=K, num=None))
    return {
        **times,
        "heads_timed_of_the_original": 1,
        "ratio": ratio(times["original_s"], times["ours_s"]),
        "cpu_ratio": ratio(times["original_cpu_s"], times["ours_cpu_s"]),
        "same_tokens": min(same),
        "memory_MB": memory,
    }


def ratio(slow: list[float], fast: list[float]) -> Ratio:
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def draw(results: dict[str, Any]) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
    names = ["low rank, chunked top-k", "full SVD, full sort"]
    ax.barh(names, [statistics.median(results[key]) for key in ("ours_s", "original_s")])
    ax.set(xlabel="seconds for all heads of a block", xscale="log")
    ax.axvline(ASKED["seconds"], color="gray", lw=0.8, ls=":")
    return figure


def main() -> None:
    args = arguments(__doc__ or "", "geometry")
    sizes, before = (SMALL if args.quick else FULL), state()
    results = measure(block(sizes), rounds=2)
    print(f"{before}; {sizes}; seconds for all heads: median over rounds\n")
    rows = [
        ["low rank, chunked top-k", *_seconds(results, "ours"), short(results["memory_MB"])],
        ["full SVD, full sort (one head × heads)", *_seconds(results, "original"), "–"],
    ]
    print(table(["method", "seconds", "range", "CPU seconds", "MB"], rows))
    print(
        f"\nthe original takes {results['ratio']} times as long, {results['cpu_ratio']} times by CPU seconds"
    )
    print(f"the same five tokens with the original's choices: {results['same_tokens']:.1%} of the directions")
    print(f"asked for: under {ASKED['seconds']:.0f} s, at least {ASKED['ratio']:.0f} times")
    write(args.out, "geometry", {"sizes": sizes, **results}, draw(results))


def _seconds(results: dict[str, Any], name: str) -> list[str]:
    clock, busy = results[f"{name}_s"], statistics.median(results[f"{name}_cpu_s"])
    return [f"{statistics.median(clock):.2f}", f"{min(clock):.2f}–{max(clock):.2f}", f"{busy:.2f}"]


if __name__ == "__main__":
    main()
