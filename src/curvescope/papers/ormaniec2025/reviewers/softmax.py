"""Questions 5 and 7: one query-key matrix against two, and the effect of softmax on the query blocks.

W_QK is compared with W_Q and W_K. Both networks start as the same function, W_QK = W_Q W_Kᵀ, with the same
number of parameters: one head of width 2 in a stream of width 4, so W_Q and W_K have 8 entries each and W_QK
16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from curvescope.closed_form import attention
from curvescope.closed_form.attention.layer import Kind
from curvescope.closed_form.bounds.growth import PAIRS
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.core.tensors import IGNORED
from curvescope.operators import GGN, Hessian
from curvescope.papers.ormaniec2025.reviewers.answers import (
    HOLDS,
    OURS,
    PAPER,
    Answer,
    Question,
    answer,
)
from curvescope.papers.ormaniec2025.reviewers.networks import (
    TOKENS,
    WIDTH,
    Config,
    addition_batch,
    embedded,
    problem,
    transformer,
)
from curvescope.studies.common.statistics import above, below, geometric_interval, mean_interval
from curvescope.studies.common.training import adam, sgd

WAYS = ("W_Q and W_K", "one W_QK")
MERGED_SIGMA = np.array([0.1, 0.3, 1.0])
RATES: dict[Optimizer, tuple[float, ...]] = {
    "gradient descent": (0.1, 0.3, 1.0, 3.0),
    "Adam": (0.003, 0.01, 0.03, 0.1),
}
SUMS = 64  # sums of the training data
HEAD = 2
TINY = 1e-12  # replaces a ratio of zero: a Hessian without a negative eigenvalue
Optimizer = Literal["gradient descent", "Adam"]
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0)
HEADS = 4  # heads per network of the other questions, because they take little time


@dataclass(frozen=True)
class Curved(Result):
    """Eigenvalues of the Hessian over the weights of the scores, for both parameterizations."""

    sigma: np.ndarray  # (S,)
    largest: np.ndarray  # (seeds, S, 2) λ_max of H
    negative: np.ndarray  # (seeds, S, 2) −λ_min(H) over λ_max(H_o)


@dataclass(frozen=True)
class TrainingLosses(Result):
    """Losses of full-batch training with one optimizer."""

    rates: np.ndarray  # (r,)
    losses: np.ndarray  # (2 ways, seeds, r, steps + 1)

    def best(self) -> np.ndarray:
        """Losses at the rate of the lowest final loss: (2 parameterizations, seeds, steps + 1)."""
        last = np.nan_to_num(self.losses[..., -1], nan=np.inf)
        chosen = last.argmin(-1)[..., None, None]
        return np.take_along_axis(self.losses, chosen, axis=2)[:, :, 0]

    def steps_to(self) -> np.ndarray:
        """Steps until a loss that both parameterizations reach, the larger final loss: (2, seeds)."""
        best = np.minimum.accumulate(self.best(), axis=-1)
        goal = best[..., -1].max(0)  # (seeds,)
        return (best > goal[:, None]).sum(-1) + 1


def pair(seed: int) -> tuple[nn.Module, nn.Module]:
    """Return the same function with two matrices and with one."""
    two = transformer(seed, d_head=HEAD)
    one = transformer(seed, d_head=HEAD, merged_qk=True)
    with torch.no_grad():
        for name, W in one.named_parameters():
            if name == "L0.W_QK":
                W.copy_(two.get_parameter("L0.W_Q") @ two.get_parameter("L0.W_K").T)
            else:
                W.copy_(two.get_parameter(name))
    return two, one


def _merged_pieces(cfg: Config) -> dict[str, Callable[[], Result]]:
    """Return the pieces: curvature, and training with each optimizer."""
    found: dict[str, Callable[[], Result]] = {"merged.curvature": lambda: curved(cfg.count, cfg.sequences)}
    for how in RATES:
        found[f"merged.{how}"] = partial(trained, how, cfg.count, cfg.steps)
    return found


def curved(seeds: int, sequences: int) -> Curved:
    """Compute extreme eigenvalues at initialization."""
    batch, rows = addition_batch(sequences), []
    for seed in range(seeds):
        X = embedded(batch, seed)
        rows.append([[_ends(module, s * X, batch.targets) for module in pair(seed)] for s in MERGED_SIGMA])
    values = np.array(rows)  # (seeds, S, 2 ways, 2)
    return Curved(MERGED_SIGMA, values[..., 0], values[..., 1])


def _ends(module: nn.Module, X: Tensor, targets: Tensor) -> tuple[float, float]:
    one = problem(module, X, targets)
    H, outer = (kind(one, "L0.W_[QK]*", engine="autograd").to_dense() for kind in (Hessian, GGN))
    values = torch.linalg.eigvalsh((H + H.T) / 2)
    return float(values[-1]), float(-values[0] / torch.linalg.eigvalsh(outer)[-1])


def trained(how: Optimizer, seeds: int, steps: int) -> TrainingLosses:
    """Train every seed with every rate; both parameterizations start as the same function, at σ = 1."""
    batch, rates = addition_batch(SUMS), torch.tensor(RATES[how], dtype=torch.float64)
    data = torch.stack([embedded(batch, seed) for seed in range(seeds)])
    found = []
    for way in range(2):
        modules = [pair(seed)[way] for seed in range(seeds) for _ in rates]
        losses = train_together(
            modules, data.repeat_interleave(len(rates), 0), batch.targets, rates=rates.repeat(seeds),
            steps=steps, how=how,
        )  # fmt: skip
        found.append(losses.reshape(seeds, len(rates), -1).numpy())
    return TrainingLosses(rates.numpy(), np.stack(found))


def _merged_answers(found: Mapping[str, Any]) -> list[Answer]:
    """Return answers on indefiniteness, the largest eigenvalue, the loss, and the speed."""
    curvature = found["merged.curvature"]
    assert isinstance(curvature, Curved)
    rows = [row for at in (0.1, 1.0) for row in _curvature(curvature, at)]
    for how in RATES:
        one = found[f"merged.{how}"]
        assert isinstance(one, TrainingLosses)
        rows += _training(how, one)
    return rows


def _curvature(one: Curved, sigma: float) -> list[Answer]:
    """Compare one matrix with two at one scale."""
    place = int(np.abs(one.sigma - sigma).argmin())
    negative, top = (values[:, place, 1] / values[:, place, 0] for values in (one.negative, one.largest))
    less, lower = geometric_interval(np.clip(negative, TINY, None)), geometric_interval(top)
    return [
        answer(5, f"one W_QK is less indefinite at σ = {sigma:g}", "< 1 times", less, below(less, 1),
               measured=f"−λ_min(H)/λ_max(H_o) {less:.2f} times that of two matrices", source=PAPER),
        answer(5, f"one W_QK has the smaller λ_max at σ = {sigma:g}", "< 1 times", lower, below(lower, 1),
               measured=f"{lower:.2f} times that of two matrices"),
    ]  # fmt: skip


def _training(how: str, one: TrainingLosses) -> list[Answer]:
    ends, steps = one.best()[..., -1], one.steps_to()
    lower = mean_interval(ends[1] - ends[0])
    faster = geometric_interval(steps[0] / steps[1])
    num, seeds = one.losses.shape[-1] - 1, ends.shape[1]
    words = f"loss {ends[1].mean():.3f} against {ends[0].mean():.3f} after {num} steps"
    words += (
        f", lower by {-lower.value:.3f} [{-lower.high:.3f}, {-lower.low:.3f}], {seeds} seeds, best rate each"
    )
    return [
        answer(5, f"one W_QK trains to a lower loss, {how}", "difference < 0", lower, below(lower, 0),
               measured=words),
        answer(5, f"one W_QK trains faster, {how}", "> 1 times", faster, above(faster, 1),
               measured=f"{faster:.2f} times as fast to the loss that both reach"),
    ]  # fmt: skip


def train_together(
    modules: Sequence[nn.Module], X: Tensor, targets: Tensor, *, rates: Tensor, steps: int, how: Optimizer
) -> Tensor:
    """Train with full batches; cross-entropy before every step and after the last: (N, steps + 1)."""
    names = [name for name, _ in modules[0].named_parameters()]
    theta = {name: torch.stack([m.get_parameter(name).detach() for m in modules]) for name in names}

    def loss(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        logits = functional_call(modules[0], parameters, (inputs,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    slopes, step_of = vmap(grad_and_value(loss)), adam if how == "Adam" else sgd
    moves = {name: step_of(W, rates.view(-1, *[1] * (W.dim() - 1))) for name, W in theta.items()}
    losses = []
    for step in range(steps + 1):
        g, value = slopes(theta, X)
        losses.append(value)
        if step < steps:
            theta = {name: moves[name](W, g[name]) for name, W in theta.items()}
    return torch.stack(losses, dim=1)


NAMES = ["".join(pair) for pair in PAIRS]


@dataclass(frozen=True)
class HeadBlockNorms(Result):
    """Frobenius norms of the six blocks of H of one head at σ = 1, with softmax and without."""

    temperatures: np.ndarray  # (t,)
    softmax: np.ndarray  # (seeds, t, 6) in the order of NAMES
    linear: np.ndarray  # (seeds, t, 6) with the scores as weights
    mean: np.ndarray  # (seeds, t, 6) with the scores divided by the number of visible tokens as weights

    def ratio(self, block: str, t: int, *, over: str = "linear") -> np.ndarray:
        """Ratio of norms with softmax and without: (seeds,)."""
        place = NAMES.index(block)
        return self.softmax[:, t, place] / getattr(self, over)[:, t, place]


def _softmax_pieces(cfg: Config) -> dict[str, Callable[[], HeadBlockNorms]]:
    """Return the piece that measures all heads in closed form."""
    return {"softmax": lambda: measure_heads(HEADS * cfg.count, cfg.sequences)}


def measure_heads(seeds: int, sequences: int) -> HeadBlockNorms:
    """Compute norms at every temperature; scores of linear attention are divided by it as well."""
    found = [[[head_norms(seed, sequences, tau, how) for how in ("softmax", "linear", "mean")]
              for tau in TEMPERATURES] for seed in range(seeds)]  # fmt: skip
    values = np.array(found)  # (seeds, t, 3, 6)
    return HeadBlockNorms(np.array(TEMPERATURES), values[:, :, 0], values[:, :, 1], values[:, :, 2])


def head_norms(seed: int, sequences: int, tau: float, how: str) -> np.ndarray:
    """‖H(block)‖ of one causal head with scores q kᵀ/(τ√d_K), under squared error against normal targets.

    `how` is softmax, linear, or mean: linear with each row divided by the number of visible tokens. The
    division is applied to G and B of the loss.
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


def _softmax_answers(found: Mapping[str, Any]) -> list[Answer]:
    """Return answers at the usual temperature and at all of them, absolute and relative to W_V."""
    one = found["softmax"]
    usual = TEMPERATURES.index(1.0)
    at_one = geometric_interval(one.ratio("QQ", usual))
    rows = [
        answer(7, "softmax reduces the block of W_Q", "< 1", at_one, below(at_one, 1), source=PAPER,
               measured=f"‖H(Q, Q)‖ with softmax over without: {at_one:.2g}"),
        _everywhere(one, "linear", "against linear attention"),
        _everywhere(one, "mean", "against linear attention divided by the number of tokens"),
    ]  # fmt: skip
    relative = [one.ratio("QQ", t) / one.ratio("VV", t) for t in range(len(TEMPERATURES))]
    claim = "it reduces the block of W_Q more than that of W_V, at every temperature"
    return [*rows, _over(claim, relative, source=PAPER)]


def _everywhere(one: HeadBlockNorms, over: str, words: str) -> Answer:
    ratios = [one.ratio("QQ", t, over=over) for t in range(len(TEMPERATURES))]
    return _over(f"it does so at every temperature, {words}", ratios)


def _over(claim: str, ratios: list[np.ndarray], *, source: str = OURS) -> Answer:
    """Verdict on whether a ratio is below one at all temperatures, or at which."""
    means = {tau: geometric_interval(values) for tau, values in zip(TEMPERATURES, ratios, strict=True)}
    verdict = _where({f"{tau:g}": below(mean, 1) for tau, mean in means.items()})
    shown = ", ".join(f"τ = {tau:g}: {mean:.2g}" for tau, mean in means.items())
    worst = max(means.values(), key=lambda mean: mean.high)
    return answer(7, claim, "< 1", worst, verdict, measured=shown, source=source)


def _where(verdicts: Mapping[str, str]) -> str:
    """Return one verdict for all temperatures, or the temperatures at which the claim holds."""
    kinds = set(verdicts.values())
    if len(kinds) == 1:
        return kinds.pop()
    right = [tau for tau, verdict in verdicts.items() if verdict == HOLDS]
    return f"holds with τ = {', '.join(right)}" if right else "not decided"


QUESTIONS = (
    Question(5, "One query-key matrix against two: curvature and training", _merged_answers, _merged_pieces),
    Question(
        7, "Softmax reduces the magnitude of query blocks: by how much?", _softmax_answers, _softmax_pieces
    ),
)
