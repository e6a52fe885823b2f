"""Leave one out, by training again: small models at a minimum, with and without a sequence.

The objective is F(θ) = Σ_i (N_i/N) ℓ_i(θ) + (λ/2) ‖θ‖², and without sequence i its term is missing while N
stays. Its Hessian is ∇²L + λ I, so that the ridge λ is the damping: none is chosen. All is full-batch and
deterministic: momentum descent from the model's initialization, then L-BFGS until the gradient is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.func import functional_call

from curvescope.algorithms import solve
from curvescope.core.operator.matrices import Matrix
from curvescope.core.result import Result
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.zoo import MLPConfig, TransformerConfig
from curvescope.operators import GGN, KFAC, Hessian, per_sample
from curvescope.problem import Problem
from curvescope.studies.influence.queries import held_out

RATE, MOMENTUM, STEPS = 0.1, 0.9, 200  # of descent, before L-BFGS
EVALUATIONS, FLAT = 4000, 1e-8  # of L-BFGS: most gradients, and the largest entry of the last one
FACTORS = (0.1, 10.0, 100.0)  # other dampings, in ridges
GGN_NAME, HESSIAN, KFAC_NAME, GRADIENTS = "GGN", "Hessian", "K-FAC", "gradients"
CASES = {"MLP": "a multilayer perceptron on digits", "Transformer": "a Transformer on a Markov chain"}


class Case(NamedTuple):
    """A small model with its data."""

    problem: Problem  # one batch
    queries: list[Problem]
    ridge: float

    @property
    def start(self) -> np.ndarray:
        """θ at initialization."""
        return (
            self.problem.space().gather({k: p.detach() for k, p in self.problem.named_parameters()}).numpy()
        )


def make_case(name: str, num_queries: int, seed: int) -> Case:
    """One of CASES."""
    if name == "MLP":
        data, ridge = task_data("digits", num_sequences=100 + num_queries, seed=seed), 0.01
        config = MLPConfig(d_in=64, d_hidden=8, d_out=10, depth=2, activation="gelu", bias=True, seed=seed)
        images = data[0]
        pairs = (images.inputs.reshape(len(images.inputs), -1), images.targets)
    else:
        data, ridge = task_data("markov", num_sequences=50 + num_queries, length=8, vocab=6, seed=seed), 0.01
        config = TransformerConfig(
            n_layers=1,
            d_model=8,
            n_heads=2,
            d_ff=16,
            n_ctx=8,
            vocab_size=6,
            norm="none",  # a ridge shrinks what a norm makes up for, and the minimum is at infinity
            init="scaled",
            seed=seed,
        )
        pairs = (data[0].inputs, data[0].targets)
    whole = Problem(load(config, dtype="float64"), pairs)
    return Case(*held_out(whole, num_queries), ridge)


@dataclass(frozen=True)
class Minimum(Result):
    """Where training has come to."""

    theta: np.ndarray  # (n,)
    objective: float
    gradient_norm: float
    evaluations: int


@dataclass(frozen=True)
class LeftOut(Result):
    """What is found without one sequence: on from the minimum (near), and from the same start (again)."""

    sequence: int
    near: np.ndarray  # (Q,) change of every query's loss
    again: np.ndarray  # (Q,)
    moved: np.ndarray  # (2,) ‖Δθ‖: near, again
    objective: np.ndarray  # (2,)
    gradient_norm: np.ndarray  # (2,)


@dataclass(frozen=True)
class Predicted(Result):
    """Predicted changes of every query's loss without every sequence."""

    ridge: float
    values: dict[str, np.ndarray]  # by method: (Q, S)
    residual: dict[str, float]  # largest over queries
    left_out: list[str]  # blocks that K-FAC has no factors for


def minimize(case: Case, start: np.ndarray, *, steps: int, without: int | None = None) -> Minimum:
    """Descent for so many steps, then L-BFGS, on the objective without one of the sequences."""
    from scipy.optimize import minimize

    problem, space = case.problem, case.problem.space()
    kept = [i for i in range(problem.batches.num_sequences) if i != without]
    batch = problem.batches[0].map(lambda t: t[kept])
    total, module = problem.num_terms, problem.model.module

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.as_tensor(x)
        leaves = {name: t.detach().requires_grad_() for name, t in space.scatter(theta).items()}
        outputs = functional_call(module, leaves, (batch.inputs,))
        value = problem.loss.sum(outputs, batch.targets, None) / total
        slopes = torch.autograd.grad(value, list(leaves.values()))
        slope = space.gather(dict(zip(leaves, slopes, strict=True))) + case.ridge * theta
        return float(value.detach()) + case.ridge / 2 * float(theta @ theta), slope.numpy()

    theta, velocity = start.copy(), np.zeros_like(start)
    for _ in range(steps):
        velocity = MOMENTUM * velocity + objective(theta)[1]
        theta = theta - RATE * velocity
    options = {"maxfun": EVALUATIONS, "maxiter": EVALUATIONS, "ftol": 0.0, "gtol": FLAT, "maxcor": 30}
    found = minimize(objective, theta, jac=True, method="L-BFGS-B", options=options)
    return Minimum(found.x, float(found.fun), float(np.linalg.norm(found.jac)), int(found.nfev) + steps)


def leave_out(case: Case, minimum: Minimum, sequence: int) -> LeftOut:
    """Train without a sequence, twice: on from the minimum, and again from the beginning."""
    near = minimize(case, minimum.theta, steps=0, without=sequence)
    again = minimize(case, case.start, steps=STEPS, without=sequence)
    before, both = losses(case, minimum.theta), (near, again)
    return LeftOut(
        sequence=sequence,
        near=losses(case, near.theta) - before,
        again=losses(case, again.theta) - before,
        moved=np.array([np.linalg.norm(one.theta - minimum.theta) for one in both]),
        objective=np.array([one.objective for one in both]),
        gradient_norm=np.array([one.gradient_norm for one in both]),
    )


def losses(case: Case, theta: np.ndarray) -> np.ndarray:
    """Of every query: (Q,)."""
    return np.array([query.at(torch.as_tensor(theta)).loss_value() for query in case.queries])


def predict(case: Case, minimum: Minimum, factors: Sequence[float] = FACTORS) -> Predicted:
    """Scores with the GGN at several dampings, with the Hessian, with K-FAC, and without any matrix.

    GGN and Hessian are written out once, for all systems. Blocks that K-FAC has no factors for, the positions
    P, are taken not to move in its scores.
    """
    theta = torch.as_tensor(minimum.theta)
    here, ridge = case.problem.at(theta), case.ridge
    B = torch.stack([query.at(theta).gradient() for query in case.queries], dim=1)
    G, H = (_written_out(op) for op in (GGN(here), Hessian(here)))
    K = KFAC(here, kind="ggn")
    systems = {GGN_NAME: solve(G, B, damping=ridge), HESSIAN: solve(H, B, method="minres", damping=ridge)}
    for factor in factors:
        systems[f"{GGN_NAME}, δ = {factor:g} λ"] = solve(G, B, damping=factor * ridge)
    columns = {name: found.x for name, found in systems.items()}
    columns[GRADIENTS] = B
    space, parts = here.space(), K.space
    own = torch.stack([parts.gather(space.scatter(b)) for b in B.T], dim=1)
    X = K.inverse(damping=ridge) @ own
    columns[KFAC_NAME] = torch.stack([space.gather(parts.scatter(x)) for x in X.T], dim=1)
    samples = per_sample(here)
    products = samples.gradient_products(torch.cat(list(columns.values()), dim=1)) * samples.shares[:, None]
    each = np.split(products.T, len(columns))
    return Predicted(
        ridge=ridge,
        values=dict(zip(columns, each, strict=True)),
        residual={name: float(np.max(found.residual)) for name, found in systems.items()},
        left_out=list(K.left_out),
    )


def _written_out(op: GGN | Hessian) -> Matrix:
    A = op.to_dense()
    return Matrix((A + A.T) / 2, symmetric=True, psd=op.psd)
