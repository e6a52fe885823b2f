"""Descent preconditioned by Kronecker factors: after K-FAC (Martens & Grosse, 2015), with `cs.KFAC`."""

from __future__ import annotations

import copy
import math
from typing import Any, final

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.models.choice import Choice
from curvescope.operators.kronecker.approximations import KFAC
from curvescope.operators.kronecker.cotangents import Kind
from curvescope.operators.kronecker.layers import Layer
from curvescope.operators.kronecker.moments import Pair
from curvescope.operators.kronecker.spectral import Spectrum, layerwise
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.objective import Closure, Objective
from curvescope.problem import Problem

FACTORS, MOMENTUM = "factors", "momentum"


@final
class KFACDescent(CurvatureOptimizer):
    """θ ← θ − lr · m, m = momentum · m + (K + damping · I)⁻¹ g, K the K-FAC of the batch's linear layers.

    The closure returns a `cs.Problem` of the batch: factors need the layers, the loss and its terms. A
    problem is in eval mode: the loss and its gradient too are those without dropout, and batch norm uses its
    running statistics and does not learn them. K is of the parameters that are trained here: of a layer whose
    bias is not, it is that of the weights alone. Parameters without factors (norms, learned positions) take
    the step rest · g in the place of the inverse's.

    From the published algorithm it differs in that factors are those of the last batch they were made of,
    with no running mean; damping is added to K itself and is fixed; the step is not rescaled by the exact
    Fisher, but bounded as in Ba et al. (2017).

    Cost of a step: 1 loss, 1 gradient. At every `every`-th step, and where other parameters are trained than
    in the last one, 2 more losses and 1 gradient (kind="mc";
    "ggn" takes as many backward passes as there are outputs), and an eigendecomposition of both factors of
    each layer, O(m³ + n³). Kept: m² + n² + mn numbers for a layer of m inputs and n outputs, and one vector
    more with momentum.

    Args:
        params: Parameters of the model, or groups, which may have an lr, momentum and rest each.
        lr: Learning rate; 1 is a full (damped) Newton step of the approximation.
        damping: δ, in units of curvature.
        momentum: Of preconditioned gradients.
        max_change: The most of lr² dᵀg, d the preconditioned gradient: longer steps are shortened; None:
            never.
        rest: Step of parameters without factors, over lr.
        every: Steps from one set of factors to the next.
        kind: Of `cs.KFAC`: "mc", "ggn", "empirical" or "forward-only".
        seed: Of the targets that "mc" draws.
    """

    kept = frozenset({MOMENTUM})

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        *,
        damping: float = 1e-2,
        momentum: float = 0.0,
        max_change: float | None = 1e-2,
        rest: float = 1.0,
        every: int = 10,
        kind: Kind = "mc",
        seed: int = 0,
    ):
        check_settings(above={"damping": damping}, at_least={"lr": lr, "momentum": momentum, "rest": rest})
        if max_change is not None:
            check_settings(above={"max_change": max_change})
        if every < 1:
            raise UsageError(f"expected every of at least 1, got {every!r}")
        settings = {
            "lr": lr, "damping": damping, "momentum": momentum, "max_change": max_change, "rest": rest,
            "every": every, "kind": kind, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    def _move(self, objective: Objective, closure: Closure) -> None:
        problem = objective.problem
        if problem is None:
            raise UsageError("KFACDescent needs a closure that returns a cs.Problem of the batch")
        gradient = objective.gradient(curved=False)
        names = {id(p): name for name, p in problem.model.named_parameters()}
        if unknown := [i for i, p in enumerate(objective.parameters) if id(p) not in names]:
            raise UsageError(f"parameter {unknown[0]} of the optimizer is none of {problem.model.name}")
        tree = {names[id(p)]: g for p, g in zip(objective.parameters, gradient, strict=True)}
        with torch.enable_grad():
            moved = self._preconditioned(problem, tree)
        steps = [moved[names[id(p)]] for p in objective.parameters]
        groups = self.groups_of(objective.parameters)
        share = _share(steps, gradient, groups, self.one("max_change"))
        for p, group, d in zip(objective.parameters, groups, steps, strict=True):
            beta, state, d = float(group["momentum"]), self.state[p], d * share
            if beta:
                d = state[MOMENTUM] = d + beta * state[MOMENTUM] if MOMENTUM in state else d.clone()
            p.sub_(d * float(group["lr"]))

    def _preconditioned(self, problem: Problem, tree: dict[str, Tensor]) -> dict[str, Tensor]:
        """(K + δ I)⁻¹ g by parameter; entries of a parameter that have no factors take the rest's step."""
        self._refresh(problem, sorted(tree))
        kept, model = self.whole(FACTORS)["layers"], problem.model
        layers = tuple(
            Layer(
                *(None if name is None else model.inputs_first(model.blocks[name]) for name in one["blocks"])
            )
            for one in kept
        )
        blocks = tuple(block for layer in layers for block in layer.blocks)
        shapes = {block.parameter: tree[block.parameter].shape for block in blocks}
        space = ParamSpace(blocks, shapes, problem.dtype, problem.device)
        spectra = [_inverse(factors, self.one("damping")) for factors in kept]
        step = layerwise(spectra, layers, space, space.gather(tree)[:, None])[:, 0]
        rest = {id(p): float(group["rest"]) for group in self.param_groups for p in group["params"]}
        found = {name: g * rest[id(problem.model.get_parameter(name))] for name, g in tree.items()}
        for block, part in zip(space, space.to_dict(step).values(), strict=True):
            block.put(part, found[block.parameter])
        return found

    def _refresh(self, problem: Problem, names: list[str]) -> None:
        """Make factors anew where it is time, or where they are of other parameters."""
        if self.steps % self.one("every") and self.whole(FACTORS).get("parameters") == names:
            return
        own = copy.copy(problem)
        own.choice = Choice(problem.model, [problem.model.get_parameter(name) for name in names])
        self.count("losses")
        K = KFAC(own, kind=self.one("kind"), seed=self.one("seed") + self.steps)
        layers = [_plain(layer, s) for layer, s in zip(K.layers, K.spectra(), strict=True)]
        self.put(FACTORS, parameters=names, layers=layers)
        self.count("losses")
        self.count("gradients")


def _share(
    steps: list[Tensor], gradient: list[Tensor], groups: list[dict[str, Any]], most: float | None
) -> float:
    """The part of the step that keeps lr² dᵀg, twice what K says of the divergence, within the bound."""
    if most is None:
        return 1.0
    pairs = zip(groups, steps, gradient, strict=True)
    size = sum(float(group["lr"]) ** 2 * float((d * g).sum(dtype=torch.float64)) for group, d, g in pairs)
    return min(1.0, math.sqrt(most / size)) if size > 0 else 1.0


def _plain(layer: Layer, spectrum: Spectrum) -> dict[str, Any]:
    """What is kept of a layer: tensors, and the names of its weights and bias."""
    names = [None if block is None else block.name for block in (layer.weight, layer.bias)]
    vectors = spectrum.vectors
    return {
        "blocks": names, "rows": vectors.rows, "columns": vectors.columns, "values": spectrum.values,
    }  # fmt: skip


def _inverse(kept: dict[str, Any], damping: float) -> Spectrum:
    return Spectrum(Pair(kept["rows"], kept["columns"]), None, 1 / (kept["values"] + damping))
