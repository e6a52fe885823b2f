"""One measurement: the parts of which a row of the history is made.

ends       loss, gradient, both ends of the spectrum, the gradient in the top eigenspace
sharpness  the top of the spectrum that the optimizer sees
trace      of the Hessian and of its blocks, from shared probes
ggn        the top of the generalised Gauss–Newton matrix, and how far it is from the Hessian
blocks     λ_max of single blocks, as many as time allows, those first that were seen longest ago
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.spectra.following import Ends, follow_ends
from curvescope.algorithms.spectra.projected import Outside, ratio_and_stderr
from curvescope.algorithms.stability.descent import Descent
from curvescope.algorithms.stability.optimizers import read_optimizer
from curvescope.algorithms.stability.sharpness import seen_by
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import probes
from curvescope.monitor.memory import Memory
from curvescope.operators import GGN, Hessian
from curvescope.problem import Problem

PARTS = ("ends", "sharpness", "trace", "ggn", "blocks")
Numbers = dict[str, float]


class Effort(NamedTuple):
    """How hard to look."""

    top: int  # eigenvectors that are followed
    tol: float  # error of λ_max that is enough, relative
    num_probes: int
    max_products: int  # of one search
    seed: int


class Look:
    """The model as it is now, seen part by part; `numbers` and `blocks` are filled on the way."""

    def __init__(self, problem: Problem, memory: Memory, effort: Effort, call: int):
        self.problem, self.memory, self.effort, self.call = problem, memory, effort, call
        self.H = Hessian(problem)
        self.space = self.H.space
        self.numbers: Numbers = {}
        self.blocks: dict[str, Numbers] = {}
        self.products = 0
        self.notes: list[str] = []
        self._ends: Ends | None = None
        self._probed: tuple[Tensor, Tensor] | None = None

    def ends(self) -> None:
        """L, ‖g‖, λ_max, λ_min, the share of g in the top eigenspace, gᵀHg/‖g‖², overlap with the last."""
        loss, g = self.problem.value(), self.problem.gradient()
        size = float(g.double().norm())
        self.numbers |= {"loss": loss, "grad_norm": size}
        if not (math.isfinite(loss) and math.isfinite(size)):
            return
        before = self.memory.take("hessian", self.space)
        starts = g[None] if before is None else torch.cat([before, g[None]])
        found = self._follow(self.H, starts if size > 0 else before, top=self.effort.top)
        self._ends = found
        top = found.vectors[: self.effort.top]
        self.numbers |= {
            "lambda_max": float(found.values[0]),
            "lambda_max_error": float(found.errors[0]),
            "lambda_min": float(found.values[-1]),
            "lambda_min_error": float(found.errors[-1]),
            "converged": float(found.converged),
        }
        if size > 0:
            self.numbers["grad_share"] = float((top @ (g / size)).double().square().sum())
            self.numbers["curvature_along_gradient"] = float(found.forms[-1])
        if before is not None:
            self.numbers["overlap"] = _overlap(before[: len(top)], top)
        self.memory.put("hessian", found.vectors, self.space)

    def sharpness(self, optimizer: torch.optim.Optimizer | None) -> None:
        """η, its thresholds, and λ_max of what the optimizer sees."""
        lambda_max = self.numbers.get("lambda_max", math.nan)
        self.numbers["threshold"] = 2.0
        if optimizer is None:
            return
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        self.numbers |= {"lr": rate, "lr_lambda_max": rate * lambda_max}
        descent = self._descent(optimizer)
        if descent is None or self._ends is None:
            return
        bound = descent.threshold
        value, error = self._seen(descent, lambda_max)
        self.numbers |= {
            "threshold": bound,
            "sharpness": value,
            "sharpness_error": error,
            "lr_sharpness": rate * value,
            "sharpness_threshold": bound,
        }

    def _descent(self, optimizer: torch.optim.Optimizer) -> Descent | None:
        try:
            return read_optimizer(_own(optimizer), self.problem.model.parameters, self.space)
        except UsageError as error:
            self.notes.append(f"no sharpness as the optimizer sees it: {error.message}")
            return None

    def _seen(self, descent: Descent, lambda_max: float) -> tuple[float, float]:
        """λ_max of P^(−½) (H + W) P^(−½); with P = I and one W for all it is that of H, and W."""
        coupled = descent.coupled
        if descent.inverse_root is None and (coupled is None or bool((coupled == coupled[0]).all())):
            shift = 0.0 if coupled is None else float(coupled[0])  # all that SGD can have
            return lambda_max + shift, self.numbers["lambda_max_error"]
        starts = self.memory.take("sharpness", self.space)
        found = self._follow(seen_by(descent, self.H), starts, top=1, bottom=False)
        self.memory.put("sharpness", found.vectors, self.space)
        return float(found.values[0]), float(found.errors[0])

    def trace(self) -> None:
        """Traces of H and of its blocks from the same probes: exact inside the subspace of the ends."""
        if self._ends is None:
            return
        X, HX = self._with_probes()
        outside = Outside(self._ends.subspace)
        exact, samples = outside.block_samples(X, HX, list(self.space.slices.values()))
        values, stderr = mean_and_stderr(exact + samples)
        total, total_stderr = mean_and_stderr((exact + samples).sum(axis=1))
        self.numbers |= {"trace": float(total), "trace_stderr": float(total_stderr)}
        for name, value, error in zip(self.space.slices, values, stderr, strict=True):
            self.blocks.setdefault(name, {}).update(trace=float(value), trace_stderr=float(error))

    def ggn(self) -> None:
        """λ_max of G, and ‖H − G‖_F / ‖H‖_F from the probes of the trace."""
        if self._ends is None or not self.problem.loss.splits:
            return
        G = GGN(self.problem)
        with G.steady():
            X, HX = self._with_probes()
            GX = G @ X
            self.products += X.shape[1]
            gap, stderr = ratio_and_stderr(HX - GX, HX)
            starts = self.memory.take("ggn", self.space)
            starts = self._ends.vectors[:1] if starts is None else starts
            found = self._follow(G, starts, top=1, bottom=False)
        self.memory.put("ggn", found.vectors, self.space)
        self.numbers |= {
            "ggn_gap": gap,
            "ggn_gap_stderr": stderr,
            "ggn_lambda_max": float(found.values[0]),
            "ggn_lambda_max_error": float(found.errors[0]),
        }

    def block_ends(self, names: list[str], enough: Callable[[], bool]) -> list[str]:
        """λ_max of blocks in this order until there is no time left; the names of those that were done."""
        done = []
        for name in names:
            if self._ends is None or (done and enough()):
                break
            op = self.H.block(name)
            starts = self.memory.take(f"block.{name}", op.space)
            if starts is None:
                starts = self._ends.vectors[:1, self.space.slices[name]]
            found = self._follow(op, starts, top=1, bottom=False)
            self.memory.put(f"block.{name}", found.vectors, op.space)
            self.blocks.setdefault(name, {}).update(
                lambda_max=float(found.values[0]),
                lambda_max_error=float(found.errors[0]),
                converged=float(found.converged),
            )
            done.append(name)
        return done

    def _with_probes(self) -> tuple[Tensor, Tensor]:
        """Probes X (n, p), the same at every measurement so that changes show, and H X."""
        if self._probed is None:
            space, effort = self.space, self.effort
            X = probes(
                space.size, effort.num_probes, seed=effort.seed, dtype=space.dtype, device=space.device
            )
            self._probed = X, self.H @ X
            self.products += effort.num_probes
        return self._probed

    def _follow(self, op: LinearOperator, starts: Tensor | None, **options: Any) -> Ends:
        effort = self.effort
        found = follow_ends(
            op,
            starts,
            tol=effort.tol,
            max_products=effort.max_products,
            seed=effort.seed + 1 + self.call,
            **options,
        )
        self.products += found.num_products
        return found


def _own(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside those that others wrap around it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _overlap(before: Tensor, now: Tensor) -> float:
    """‖V Wᵀ‖_F² / k for orthonormal rows V and W, the rows before made orthonormal again."""
    Q = torch.linalg.qr(before.T.double())[0]
    return float((now.double() @ Q).square().sum()) / len(now)


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those that were measured."""
    return {name: value for name, value in numbers.items() if not np.isnan(value)}
