"""Question 5. One query-key matrix W_QK against W_Q and W_K: curvature, and what it does to training.

Both networks begin as the same function, W_QK = W_Q W_Kᵀ, and have as many parameters: one head of width 2 in
a stream of width 4, so W_Q and W_K have 8 entries each and W_QK has 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.result import Result
from curvescope.operators import GGN, Hessian
from curvescope.papers.ormaniec2025.reviewers.answers import PAPER, Answer, answer, less_than, more_than
from curvescope.papers.ormaniec2025.reviewers.setting import (
    Config,
    addition_batch,
    embedded,
    problem,
    transformer,
)
from curvescope.papers.ormaniec2025.reviewers.slopes import mean_of, ratio_of
from curvescope.papers.ormaniec2025.reviewers.training import Optimizer, train_together

QUESTION = "One query-key matrix against two: curvature and training"
WAYS = ("W_Q and W_K", "one W_QK")
SIGMA = np.array([0.1, 0.3, 1.0])
RATES: dict[Optimizer, tuple[float, ...]] = {
    "gradient descent": (0.1, 0.3, 1.0, 3.0),
    "Adam": (0.003, 0.01, 0.03, 0.1),
}
SUMS = 64  # of the training data
HEAD = 2
TINY = 1e-12  # of a ratio: a Hessian without a negative eigenvalue


@dataclass(frozen=True)
class Curved(Result):
    """The Hessian over the weights of the scores, by way."""

    sigma: np.ndarray  # (S,)
    largest: np.ndarray  # (seeds, S, 2) λ_max of H
    negative: np.ndarray  # (seeds, S, 2) −λ_min(H) over λ_max(H_o)


@dataclass(frozen=True)
class Trained(Result):
    """Losses of whole-batch training with one optimizer."""

    rates: np.ndarray  # (r,)
    losses: np.ndarray  # (2 ways, seeds, r, steps + 1)

    def best(self) -> np.ndarray:
        """Losses with the rate that ends lowest, by way and seed: (2, seeds, steps + 1)."""
        last = np.nan_to_num(self.losses[..., -1], nan=np.inf)
        chosen = last.argmin(-1)[..., None, None]
        return np.take_along_axis(self.losses, chosen, axis=2)[:, :, 0]

    def steps_to(self) -> np.ndarray:
        """Steps until a loss that both ways reach, the larger of their ends: (2, seeds)."""
        best = np.minimum.accumulate(self.best(), axis=-1)
        goal = best[..., -1].max(0)  # (seeds,)
        return (best > goal[:, None]).sum(-1) + 1


def pair(seed: int) -> tuple[nn.Module, nn.Module]:
    """The same function with two matrices and with one."""
    two = transformer(seed, d_head=HEAD)
    one = transformer(seed, d_head=HEAD, merged_qk=True)
    with torch.no_grad():
        for name, W in one.named_parameters():
            if name == "L0.W_QK":
                W.copy_(two.get_parameter("L0.W_Q") @ two.get_parameter("L0.W_K").T)
            else:
                W.copy_(two.get_parameter(name))
    return two, one


def pieces(cfg: Config) -> dict[str, Callable[[], Result]]:
    """Curvature, and training with each optimizer."""
    found: dict[str, Callable[[], Result]] = {"merged.curvature": lambda: curved(cfg.count, cfg.sequences)}
    for how in RATES:
        found[f"merged.{how}"] = partial(trained, how, cfg.count, cfg.steps)
    return found


def curved(seeds: int, sequences: int) -> Curved:
    """Extreme eigenvalues at the beginning."""
    batch, rows = addition_batch(sequences), []
    for seed in range(seeds):
        X = embedded(batch, seed)
        rows.append([[_ends(module, s * X, batch.targets) for module in pair(seed)] for s in SIGMA])
    values = np.array(rows)  # (seeds, S, 2 ways, 2)
    return Curved(SIGMA, values[..., 0], values[..., 1])


def _ends(module: nn.Module, X: Tensor, targets: Tensor) -> tuple[float, float]:
    one = problem(module, X, targets)
    H, outer = (kind(one, "L0.W_[QK]*", engine="autograd").to_dense() for kind in (Hessian, GGN))
    values = torch.linalg.eigvalsh((H + H.T) / 2)
    return float(values[-1]), float(-values[0] / torch.linalg.eigvalsh(outer)[-1])


def trained(how: Optimizer, seeds: int, steps: int) -> Trained:
    """Every seed with every rate, both ways from the same function on the same data at σ = 1."""
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
    return Trained(rates.numpy(), np.stack(found))


def answers(found: Mapping[str, Result]) -> list[Answer]:
    """Indefiniteness, the largest eigenvalue, the loss, and the speed."""
    curvature = found["merged.curvature"]
    assert isinstance(curvature, Curved)
    rows = [row for at in (0.1, 1.0) for row in _curvature(curvature, at)]
    for how in RATES:
        one = found[f"merged.{how}"]
        assert isinstance(one, Trained)
        rows += _training(how, one)
    return rows


def _curvature(one: Curved, sigma: float) -> list[Answer]:
    """Ratios of one matrix to two at a scale."""
    place = int(np.abs(one.sigma - sigma).argmin())
    negative, top = (values[:, place, 1] / values[:, place, 0] for values in (one.negative, one.largest))
    less, lower = ratio_of(np.clip(negative, TINY, None)), ratio_of(top)
    return [
        answer(5, f"one W_QK is less indefinite at σ = {sigma:g}", "< 1 times", less, less_than(less, 1),
               measured=f"−λ_min(H)/λ_max(H_o) {less} times that of two matrices", source=PAPER),
        answer(5, f"one W_QK has the smaller λ_max at σ = {sigma:g}", "< 1 times", lower, less_than(lower, 1),
               measured=f"{lower} times that of two matrices"),
    ]  # fmt: skip


def _training(how: str, one: Trained) -> list[Answer]:
    ends, steps = one.best()[..., -1], one.steps_to()
    lower = mean_of(ends[1] - ends[0])
    faster = ratio_of(steps[0] / steps[1])
    num, seeds = one.losses.shape[-1] - 1, ends.shape[1]
    words = f"loss {ends[1].mean():.3f} against {ends[0].mean():.3f} after {num} steps"
    words += (
        f", lower by {-lower.value:.3f} [{-lower.high:.3f}, {-lower.low:.3f}], {seeds} seeds, best rate each"
    )
    return [
        answer(5, f"one W_QK trains to a lower loss, {how}", "difference < 0", lower, less_than(lower, 0),
               measured=words),
        answer(5, f"one W_QK trains faster, {how}", "> 1 times", faster, more_than(faster, 1),
               measured=f"{faster} times as fast to the loss that both reach"),
    ]  # fmt: skip
