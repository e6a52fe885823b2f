"""Question 7. Softmax "reduces the magnitude of query blocks": by how much, per block, over temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.attention.layer import Kind
from curvescope.closed_form.bounds.growth import PAIRS
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.papers.ormaniec2025.reviewers.answers import HOLDS, OURS, PAPER, Answer, answer, less_than
from curvescope.papers.ormaniec2025.reviewers.setting import TOKENS, WIDTH, Config, addition_batch, embedded
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, ratio_of

QUESTION = "Softmax reduces the magnitude of query blocks: by how much?"
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0)
HEADS = 4  # for each network of the other questions: they cost little
NAMES = ["".join(pair) for pair in PAIRS]


@dataclass(frozen=True)
class Heads(Result):
    """Frobenius norms of the six blocks of H of one head at σ = 1, with softmax and without."""

    temperatures: np.ndarray  # (t,)
    softmax: np.ndarray  # (seeds, t, 6) in the order of NAMES
    linear: np.ndarray  # (seeds, t, 6): the scores themselves are the weights
    mean: np.ndarray  # (seeds, t, 6): the scores over the number of tokens that are seen

    def ratio(self, block: str, t: int, *, over: str = "linear") -> np.ndarray:
        """With softmax over without: (seeds,)."""
        place = NAMES.index(block)
        return self.softmax[:, t, place] / getattr(self, over)[:, t, place]


def pieces(cfg: Config) -> dict[str, Callable[[], Heads]]:
    """All heads, in closed form."""
    return {"softmax": lambda: measure(HEADS * cfg.count, cfg.sequences)}


def measure(seeds: int, sequences: int) -> Heads:
    """Norms at every temperature; of linear attention too, whose scores are divided by it as well."""
    found = [[[norms(seed, sequences, tau, how) for how in ("softmax", "linear", "mean")]
              for tau in TEMPERATURES] for seed in range(seeds)]  # fmt: skip
    values = np.array(found)  # (seeds, t, 3, 6)
    return Heads(np.array(TEMPERATURES), values[:, :, 0], values[:, :, 1], values[:, :, 2])


def norms(seed: int, sequences: int, tau: float, how: str) -> np.ndarray:
    """‖H(block)‖ of one causal head with scores q kᵀ/(τ√d_K), under squared error against normal targets.

    `how` is softmax, linear, or mean: linear with each row divided by the number of tokens it sees, which
    here is put into what the row hands on, G and B of the loss.
    """
    X, source = embedded(addition_batch(sequences), seed), generator(seed, 3)
    W_Q, W_K, W_V = (
        0.8 * WIDTH**-0.5 * torch.randn(WIDTH, WIDTH, generator=source).double() for _ in range(3)
    )
    Y = torch.randn(X.shape, generator=source).double()
    kind: Kind = "softmax" if how == "softmax" else "linear"
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    scale, c = 1 / (tau * WIDTH**0.5), 2 / X.numel()
    t = scale * (X @ W_Q) @ (X @ W_K).mT
    A = t.masked_fill(~seen, -torch.inf).softmax(-1) if kind == "softmax" else t.masked_fill(~seen, 0.0)
    share = 1 / seen.sum(-1, keepdim=True).double() if how == "mean" else torch.ones(TOKENS, 1).double()
    G = c * share * (share * (A @ X @ W_V) - Y)
    B = c * torch.eye(WIDTH).double() * share[:, :, None] ** 2
    found = attention.curvature(
        X, W_Q, W_K, W_V, G, B.expand(len(X), -1, -1, -1), mask=seen, scale=scale, kind=kind
    )
    return np.array([float(found.frobenius(pair, "total")) for pair in PAIRS])


def answers(found: Mapping[str, Heads]) -> list[Answer]:
    """At the usual temperature and at all of them, absolutely and relative to W_V."""
    one = found["softmax"]
    usual = TEMPERATURES.index(1.0)
    at_one = ratio_of(one.ratio("QQ", usual))
    rows = [
        answer(7, "softmax reduces the block of W_Q", "< 1", at_one, less_than(at_one, 1), source=PAPER,
               measured=f"‖H(Q, Q)‖ with softmax over without: {_short(at_one)}"),
        _everywhere(one, "linear", "against linear attention"),
        _everywhere(one, "mean", "against linear attention divided by the number of tokens"),
    ]  # fmt: skip
    relative = [one.ratio("QQ", t) / one.ratio("VV", t) for t in range(len(TEMPERATURES))]
    claim = "it reduces the block of W_Q more than that of W_V, at every temperature"
    return [*rows, _over(claim, relative, source=PAPER)]


def _everywhere(one: Heads, over: str, words: str) -> Answer:
    ratios = [one.ratio("QQ", t, over=over) for t in range(len(TEMPERATURES))]
    return _over(f"it does so at every temperature, {words}", ratios)


def _over(claim: str, ratios: list[np.ndarray], *, source: str = OURS) -> Answer:
    """Whether a ratio is below one at all temperatures, or at which."""
    means = {tau: ratio_of(values) for tau, values in zip(TEMPERATURES, ratios, strict=True)}
    verdict = _where({f"{tau:g}": less_than(mean, 1) for tau, mean in means.items()})
    shown = ", ".join(f"τ = {tau:g}: {_short(mean)}" for tau, mean in means.items())
    worst = max(means.values(), key=lambda mean: mean.high)
    return answer(7, claim, "< 1", worst, verdict, measured=shown, source=source)


def _where(verdicts: Mapping[str, str]) -> str:
    """One verdict for all temperatures, or those with which it holds."""
    kinds = set(verdicts.values())
    if len(kinds) == 1:
        return kinds.pop()
    right = [tau for tau, verdict in verdicts.items() if verdict == HOLDS]
    return f"holds with τ = {', '.join(right)}" if right else "not decided"


def _short(mean: Mean) -> str:
    return f"{mean.value:.2g} [{mean.low:.2g}, {mean.high:.2g}]"
