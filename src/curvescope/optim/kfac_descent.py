"""Descent preconditioned by Kronecker factors: after K-FAC (Martens & Grosse, 2015), with `cs.KFAC`."""

from __future__ import annotations

import copy
import math
from typing import Any, final

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.models.parameter_selection import ParameterChoice
from curvescope.operators.kronecker.approximations import KFAC
from curvescope.operators.kronecker.cotangents import Kind
from curvescope.operators.kronecker.layers import KroneckerLayer
from curvescope.operators.kronecker.moments import FactorPair
from curvescope.operators.kronecker.spectral import LayerSpectrum, layerwise
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.objective import Closure, StepObjective
from curvescope.problem import Problem

FACTORS, MOMENTUM = "factors", "momentum"


@final
class KFACDescent(CurvatureOptimizer):
    """θ ← θ − lr · m, m = momentum · m + (K + damping · I)⁻¹ g, K the K-FAC of the batch's linear layers.

    The closure returns a `cs.Problem` of the batch: factors need the layers, the loss and its terms. A
    problem is in eval mode: its loss and gradient have no dropout, and batch norm uses its running statistics
    without updating them. K covers the parameters that the optimizer trains; if a layer's bias is not
    trained, only its weights. Parameters without factors (norms, learned positions) take the step rest · g
    instead.

    It differs from the published algorithm: factors come from one batch, without a running mean; a fixed
    damping is added to K itself; the step is not rescaled by the exact Fisher, but bounded as in Ba et al.
    (2017).

    Cost of a step: 1 loss, 1 gradient. At every `every`-th step, and if the trained parameters have changed,
    2 more losses and 1 gradient (kind="mc"; "ggn" takes as many backward passes as there are outputs), and an
    eigendecomposition of both factors of each layer, O(m³ + n³). It stores m² + n² + mn numbers for a layer
    of m inputs and n outputs, and one more vector with momentum.

    Args:
        params: Parameters of the model, or groups, which may have their own lr, momentum and rest.
        lr: Learning rate; 1 is a full (damped) Newton step of the approximation.
        damping: δ, in units of curvature.
        momentum: Momentum of preconditioned gradients.
        max_change: Upper bound of lr² dᵀg for the preconditioned gradient d; longer steps are shortened.
            None: no bound.
        rest: Step of parameters without factors, relative to lr.
        every: Steps between sets of factors.
        kind: Kind of `cs.KFAC`: "mc", "ggn", "empirical" or "forward-only".
        seed: Seed of the targets that "mc" draws.
    """

    state_names = frozenset({MOMENTUM})

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

    def _move(self, objective: StepObjective, closure: Closure) -> None:
        problem = objective.problem
        if problem is None:
            raise UsageError("KFACDescent needs a closure that returns a cs.Problem of the batch")
        gradient = objective.gradient(curved=False)
        names = {id(p): name for name, p in problem.model.named_parameters()}
        if unknown := [i for i, p in enumerate(objective.parameters) if id(p) not in names]:
            raise UsageError(f"parameter {unknown[0]} of the optimizer is not in {problem.model.name}")
        tree = {names[id(p)]: g for p, g in zip(objective.parameters, gradient, strict=True)}
        with torch.enable_grad():
            moved = self._preconditioned(problem, tree)
        steps = [moved[names[id(p)]] for p in objective.parameters]
        groups = self.groups_of(objective.parameters)
        share = _step_factor(steps, gradient, groups, self.shared_setting("max_change"))
        for p, group, d in zip(objective.parameters, groups, steps, strict=True):
            beta, state, d = float(group["momentum"]), self.state[p], d * share
            if beta:
                d = state[MOMENTUM] = d + beta * state[MOMENTUM] if MOMENTUM in state else d.clone()
            p.sub_(d * float(group["lr"]))

    def _preconditioned(self, problem: Problem, tree: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return (K + δ I)⁻¹ g by parameter; entries without factors get rest · g."""
        self._refresh(problem, sorted(tree))
        layer_states, model = self.shared_state(FACTORS)["layers"], problem.model
        layers = tuple(
            KroneckerLayer(
                *(
                    None if name is None else model.inputs_first(model.blocks[name])
                    for name in layer_state["blocks"]
                )
            )
            for layer_state in layer_states
        )
        blocks = tuple(block for layer in layers for block in layer.blocks)
        shapes = {block.parameter: tree[block.parameter].shape for block in blocks}
        space = ParamSpace(blocks, shapes, problem.dtype, problem.device)
        spectra = [_inverse(factors, self.shared_setting("damping")) for factors in layer_states]
        step = layerwise(spectra, layers, space, space.gather(tree)[:, None])[:, 0]
        rest_of_parameter = {
            id(p): float(group["rest"]) for group in self.param_groups for p in group["params"]
        }
        preconditioned = {
            name: g * rest_of_parameter[id(problem.model.get_parameter(name))] for name, g in tree.items()
        }
        for block, part in zip(space, space.to_dict(step).values(), strict=True):
            block.put(part, preconditioned[block.parameter])
        return preconditioned

    def _refresh(self, problem: Problem, names: list[str]) -> None:
        """Recompute the factors if they are due, or if the trained parameters have changed."""
        if (
            self.steps % self.shared_setting("every")
            and self.shared_state(FACTORS).get("parameters") == names
        ):
            return
        batch_problem = copy.copy(problem)
        batch_problem.choice = ParameterChoice(
            problem.model, [problem.model.get_parameter(name) for name in names]
        )
        self.count("losses")
        K = KFAC(
            batch_problem, kind=self.shared_setting("kind"), seed=self.shared_setting("seed") + self.steps
        )
        layers = [_layer_state(layer, s) for layer, s in zip(K.layers, K.spectra(), strict=True)]
        self.update_shared_state(FACTORS, parameters=names, layers=layers)
        self.count("losses")
        self.count("gradients")


def _step_factor(
    steps: list[Tensor], gradient: list[Tensor], groups: list[dict[str, Any]], max_change: float | None
) -> float:
    """Return the factor on the step that keeps lr² dᵀg, twice K's estimate of the divergence, within the
    bound.
    """
    if max_change is None:
        return 1.0
    pairs = zip(groups, steps, gradient, strict=True)
    size = sum(float(group["lr"]) ** 2 * float((d * g).sum(dtype=torch.float64)) for group, d, g in pairs)
    return min(1.0, math.sqrt(max_change / size)) if size > 0 else 1.0


def _layer_state(layer: KroneckerLayer, spectrum: LayerSpectrum) -> dict[str, Any]:
    """Return the state of a layer: tensors, and the names of its weights and bias."""
    names = [None if block is None else block.name for block in (layer.weight, layer.bias)]
    vectors = spectrum.vectors
    return {
        "blocks": names, "rows": vectors.rows, "columns": vectors.columns, "values": spectrum.values,
    }  # fmt: skip


def _inverse(layer_state: dict[str, Any], damping: float) -> LayerSpectrum:
    return LayerSpectrum(
        FactorPair(layer_state["rows"], layer_state["columns"]), None, 1 / (layer_state["values"] + damping)
    )
