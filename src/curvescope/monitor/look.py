"""One measurement: the parts of which a row of the history is made.

    ends       loss, gradient, both ends of the spectrum, the gradient in the top eigenspace
    sharpness  the top of the spectrum that the optimizer sees
    trace      of the Hessian and of its blocks, from shared probes
    ggn        the top of the generalized Gauss–Newton matrix, and how far it is from the Hessian
    verify     searches from random vectors for what following eigenvectors may have missed
    blocks     λ_max of single blocks, as many as time allows, those first that were seen longest ago

Every search begins with the vectors of the last time and a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.estimates.intervals import mean_interval, student
from curvescope.algorithms.spectra.following import Ends, Outside, follow_ends, ratio_and_stderr
from curvescope.algorithms.spectra.lanczos import Eigenpairs, eigsh
from curvescope.algorithms.stability.optimizers import Descent, read_optimizer
from curvescope.algorithms.stability.sharpness import seen_by
from curvescope.algorithms.sums import norms, to_numpy
from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import probes
from curvescope.monitor.memory import Memory
from curvescope.operators import GGN, Hessian
from curvescope.problem import Problem

PARTS = ("ends", "sharpness", "trace", "ggn", "verify", "blocks")
Numbers = dict[str, float]
LOOSE = 0.05  # residual of the other top eigenvectors that is enough, relative to λ_max
TINY = 1e-30
MOST_LOG = 700.0  # of a factor that a float has
SWEEP = 150  # most products of a search for what was missed
OWN_PROBES = 2**20  # columns of the random matrix that belong to one step


class Effort(NamedTuple):
    """How hard to look."""

    top: int  # eigenvectors that are followed
    tol: float  # error of λ_max that is enough, relative
    num_probes: int
    max_products: int  # of one search
    seed: int


class Look:
    """The model as it is now, seen part by part; `numbers` and `blocks` are filled on the way."""

    def __init__(self, problem: Problem, memory: Memory, effort: Effort, call: int, *, step: int = 0):
        self.problem, self.memory, self.effort, self.call = problem, memory, effort, call
        self.step = step  # of the training loop: each has probes of its own
        self.H = Hessian(problem).in_blocks()
        self.space = self.H.space
        self.numbers: Numbers = {}
        self.blocks: dict[str, Numbers] = {}
        self.products = 0
        self.notes: list[str] = []
        self.stop: Callable[[], bool] | None = None  # searches end where it says so, with what they have
        self._ends: Ends | None = None
        self._gradient = torch.zeros(0)
        self._searched: dict[str, tuple[LinearOperator, Ends]] = {}  # by the name of their number
        self._probed: tuple[Tensor, Tensor] | None = None

    def most_products(self, parts: Sequence[str], num_blocks: int) -> int:
        """Products that the parts take at most."""
        search, num_probes = self.effort.max_products, self.effort.num_probes
        most = {"ends": search, "sharpness": search, "trace": num_probes, "ggn": search + num_probes}
        most |= {"verify": SWEEP * len({"ends", "sharpness", "ggn"}.intersection(parts))}
        most |= {"blocks": search * num_blocks}
        return sum(most[part] for part in parts)

    def ends(self) -> None:
        """L, ‖g‖, λ_max, λ_min, the share of g in the top eigenspace, gᵀHg/‖g‖², overlap with the last."""
        loss, g = self.problem.loss_value(), self._own(self.problem.gradient())
        size = float(g.double().norm())
        self.numbers |= {"loss": loss, "grad_norm": size}
        if not (math.isfinite(loss) and math.isfinite(size)):
            return
        self._gradient = g
        before = self.memory.take("lambda_max", self.space)
        lowest = self.memory.take("lambda_min", self.space)
        known = [rows for rows in (before, lowest) if rows is not None]
        found = self._follow(
            self.H, torch.cat(known) if known else None, g[None], top=self.effort.top, loose=LOOSE
        )
        self._ends = found
        top, bottom = found.vectors[: self.effort.top], found.subspace.lowest(2)
        self.numbers |= {
            "lambda_max": float(found.values[0]),
            "lambda_max_error": float(found.errors[0]),
            "lambda_min": float(found.values[-1]),
            "lambda_min_error": float(found.errors[-1]),
            "converged": float(found.converged),
            "eigenspace_error": found.angle,
        }
        if size > 0:
            self.numbers["grad_share"] = float((top @ (g / size)).double().square().sum())
            self.numbers["curvature_along_gradient"] = float(found.forms[-1])
        if before is not None and len(before) == len(top):
            self.numbers["overlap"] = _overlap(before, top)
        self.memory.put("lambda_max", top, self.space)
        self.memory.put("lambda_min", bottom, self.space)
        self._searched["lambda"] = self.H, found

    def _own(self, vector: Tensor) -> Tensor:
        """A vector over the problem with one block after the other, as all vectors are here."""
        return self.problem.space().convert(vector, self.space)

    def sharpness(self, optimizer: torch.optim.Optimizer | None) -> None:
        """η, its thresholds, and λ_max of what the optimizer sees."""
        lambda_max = self.numbers.get("lambda_max", math.nan)
        if optimizer is None:
            self.numbers["threshold"] = 2.0
            return
        self.numbers["lr"] = self._rate(optimizer)
        descent = self._descent(optimizer)
        if descent is None or self._ends is None:
            return
        value, error = self._seen(descent, lambda_max)
        if descent.inverse_root is None:  # otherwise λ_max of H is not what it sees
            self.numbers["threshold"] = descent.threshold
        self.numbers |= {"sharpness": value, "sharpness_error": error}
        self.numbers["sharpness_threshold"] = descent.threshold
        self.notes += [f"{descent.name}: {word}" for word in descent.assumed if word.startswith("√v")]

    def _rate(self, optimizer: torch.optim.Optimizer) -> float:
        """The largest learning rate among the parameters that are measured; of all if it has none of them."""
        own = {id(self.problem.model.get_parameter(name)) for name in self.space.parameter_names}
        groups = optimizer.param_groups
        meant = [group for group in groups if any(id(p) in own for p in group["params"])]
        return max(float(group["lr"]) for group in meant or groups)

    def _descent(self, optimizer: torch.optim.Optimizer) -> Descent | None:
        try:
            return read_optimizer(_own(optimizer), dict(self.problem.model.named_parameters()), self.space)
        except UsageError as error:
            self.notes.append(f"no sharpness as the optimizer sees it: {error.message}")
            return None

    def _seen(self, descent: Descent, lambda_max: float) -> tuple[float, float]:
        """λ_max of P^(−½) (H + W) P^(−½); with P = I and one W for all it is that of H, and W."""
        coupled = descent.coupled
        if descent.inverse_root is None and (coupled is None or bool((coupled == coupled[0]).all())):
            shift = 0.0 if coupled is None else float(coupled[0])  # all that SGD can have
            return lambda_max + shift, self.numbers["lambda_max_error"]
        root = descent.inverse_root
        g = self._gradient if root is None else root @ self._gradient
        found = self._largest("sharpness", seen_by(descent, self.H), self.space, g)
        return float(found.values[0]), float(found.errors[0])

    def trace(self) -> None:
        """Traces of H and of its blocks from the same probes: exact inside the subspace of the ends."""
        if self._ends is None:
            return
        X, HX = self._with_probes()
        outside = Outside(self._ends.subspace)
        exact, samples = outside.block_samples(X, HX, list(self.space.slices.values()))
        self.numbers |= _with_interval("trace", (exact + samples).sum(axis=1))
        self.numbers["num_probes"] = float(len(samples))
        for name, own in zip(self.space.slices, (exact + samples).T, strict=True):
            self.blocks.setdefault(name, {}).update(_with_interval("trace", own))

    def ggn(self) -> None:
        """λ_max of H_o, and ‖H − H_o‖_F / ‖H‖_F from the probes of the trace."""
        if self._ends is None or not self.problem.loss.splits:
            return
        G = GGN(self.problem).in_blocks()
        with G.frozen():
            X, HX = self._with_probes()
            GX = G @ X
            self.products += X.shape[1]
            gap, stderr = ratio_and_stderr(HX - GX, HX)
            low, high = gap_interval(HX - GX, HX)
            found = self._largest("ggn_lambda_max", G, self.space, self._gradient)
        self.numbers |= {
            "ggn_gap": gap,
            "ggn_gap_stderr": stderr,
            "ggn_gap_low": low,
            "ggn_gap_high": high,
            "ggn_lambda_max": float(found.values[0]),
            "ggn_lambda_max_error": float(found.errors[0]),
        }

    def verify(self) -> None:
        """Look for eigenvalues beyond those found, as `eigsh` does: overlooked 1 time in 1000 at each end.

        What it finds takes the place of what was found by following.
        """
        for name, (op, ends) in self._searched.items():
            both = name == "lambda"
            found = eigsh(
                op,
                min(1 + both, op.shape[0]),
                which="BE" if both else "LA",
                tol=self.effort.tol,
                max_products=SWEEP,
                seed=self.effort.seed + self.call,
                v0=ends.vectors[[0, -1] if both else [0]].T,
            )
            self.products += found.num_products
            self.numbers["verified"] = min(self.numbers.get("verified", 1.0), float(found.converged))
            self._replace(f"{name}_max" if both else name, 1, found, -1 if both else 0)
            if both:
                self._replace(f"{name}_min", -1, found, 0)

    def _replace(self, name: str, sign: int, found: Eigenpairs, i: int) -> None:
        """Take the eigenvalue that lies further out; one that was missed is followed from now on."""
        assert found.vectors is not None
        further = sign * (found.values[i] - self.numbers[name])
        if further > self.numbers[f"{name}_error"]:
            kept = self.memory.take(name, self.space)
            assert kept is not None
            missed = found.vectors[:, i].to(kept)
            self.memory.put(name, torch.cat([missed[None], kept[: len(kept) - 1]]), self.space)
            self.numbers |= {"eigenspace_error": 1.0} if name == "lambda_max" else {}
        if further > 0:
            error = float(found.residuals[i])
            if sign < 0:  # as `follow_ends` states it
                error = max(error, self.effort.tol * float(abs(found.values).max()))
            self.numbers |= {name: float(found.values[i]), f"{name}_error": error}

    def rates(self) -> None:
        """η times what was found, at the end."""
        for name in ("lambda_max", "sharpness"):
            if name in self.numbers and "lr" in self.numbers:
                self.numbers[f"lr_{name}"] = self.numbers["lr"] * self.numbers[name]

    def block_end(self, name: str) -> bool:
        """λ_max of one block; False where there is none to be had.

        On a GPU through the products of the whole: those of a block would be compiled and recorded anew.
        """
        if self._ends is None:
            return False
        rows, space = self.space.slices[name], self.problem.space(name)
        op = self.H.block(name) if self.H.device.type == "cpu" else self.H[rows, rows]
        found = self._largest(f"block.{name}", op, space, self._gradient[rows])
        self.blocks.setdefault(name, {}).update(
            lambda_max=float(found.values[0]),
            lambda_max_error=float(found.errors[0]),
            converged=float(found.converged),
        )
        return True

    def _with_probes(self) -> tuple[Tensor, Tensor]:
        """Probes X (n, p) and H X.

        They depend on the seed and the step alone: rows of the history do not err together, and a run that is
        resumed draws the same ones.
        """
        if self._probed is None:
            space, count = self.space, self.effort.num_probes
            first = (1 + self.step) * OWN_PROBES
            X = probes(
                space.size, count, seed=self.effort.seed, first=first, dtype=space.dtype, device=space.device
            )
            self._probed = X, self.H @ X
            self.products += count
        return self._probed

    def _largest(self, name: str, op: LinearOperator, space: ParamSpace, g: Tensor) -> Ends:
        """λ_max of another operator, from its own vectors of the last time and a gradient.

        The second eigenvector is followed too, roughly: it is the next to be the first.
        """
        kept = self.memory.take(name, space)
        known = [g[None] / g.norm().clamp_min(TINY), *([] if kept is None else [kept])]
        found = self._follow(op, torch.cat(known), top=2, bottom=False, tol=2 * self.effort.tol)
        self.memory.put(name, found.vectors, space)
        if space is self.space:
            self._searched[name] = op, found
        return found

    def _follow(
        self, op: LinearOperator, followed: Tensor | None, beside: Tensor | None = None, **options: Any
    ) -> Ends:
        effort = self.effort
        settings = {"tol": effort.tol, "max_products": effort.max_products, "stop": self.stop, **options}
        found = follow_ends(op, followed, beside, seed=effort.seed + 1 + self.call, **settings)
        self.products += found.num_products
        return found


def _with_interval(name: str, samples: np.ndarray) -> Numbers:
    """Mean over samples (p,), its standard error, and the ends of Student's 95 % interval, by column."""
    mean, stderr = mean_and_stderr(samples)
    low, high = mean_interval(mean, stderr, len(samples) - 1)
    return {
        name: float(mean),
        f"{name}_stderr": float(stderr),
        f"{name}_low": float(low),
        f"{name}_high": float(high),
    }


def gap_interval(part: Tensor, whole: Tensor) -> tuple[float, float]:
    """95 % interval of ‖B‖_F / ‖A‖_F, from B X and A X (n, p).

    It is gap · exp(± (h + h min(h, 1) / 2)), h Student's half width of the logarithm with its jackknife
    standard error. The second term widens it as `positive_interval` is: one probe may dominate the sums,
    and Student's interval alone held in 90 of 100 measurements with 8 probes.
    """
    b, a = to_numpy(norms(part, dim=0)) ** 2, to_numpy(norms(whole, dim=0)) ** 2
    if not (a.sum() > 0 and b.sum() > 0):
        gap = 0.0 if a.sum() > 0 else math.nan
        return gap, gap
    gap, count = math.sqrt(b.sum() / a.sum()), len(a)
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.log((b.sum() - b) / (a.sum() - a)) / 2  # one probe left out
        stderr = math.sqrt((count - 1) / count * np.square(without - without.mean()).sum())
    h = student(count - 1) * stderr
    wide = min(h + h * min(h, 1.0) / 2, MOST_LOG) if math.isfinite(h) else MOST_LOG
    return gap * math.exp(-wide), gap * math.exp(wide)


def _own(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside those that others wrap around it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _overlap(before: Tensor, now: Tensor) -> float:
    """‖V Wᵀ‖_F² / k for orthonormal rows V and W, the rows before made orthonormal again."""
    Q = torch.linalg.qr(before.T.double())[0]
    return float((now.double() @ Q).square().sum()) / len(now)
