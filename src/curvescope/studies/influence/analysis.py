"""Training sequences and queries of the study `influence`, its scores, and retraining.

Influence of every training sequence on the loss of a query, by one linear system for each query.

The training loss is L = Σ_i (N_i/N) ℓ_i over sequences i of N_i terms each, N in all. Without sequence i,
and with unchanged weights of the others, its minimum moves by (N_i/N) (∇²L)⁻¹ ∇ℓ_i to first order. With the
GGN H_o of L for ∇²L, and a damping δ, the loss of a query q therefore changes by about

    s_i = (N_i/N) ∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i.

So s_i > 0 means that sequence i helped: without it the query's loss is higher. The influence function of
the literature (Koh & Liang 2017), the slope in the weight of sequence i, is −∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i.

One linear solve gives x = (H_o + δ I)⁻¹ ∇ℓ_q. Its residual r bounds the error of every score, because all
eigenvalues of H_o + δ I are at least δ: |s_i − s̃_i| ≤ (N_i/N) ‖r‖ ‖∇ℓ_i‖ / δ, plus rounding.

Leave-one-out by retraining: small models at a minimum, with and without a sequence.

The objective is F(θ) = Σ_i (N_i/N) ℓ_i(θ) + (λ/2) ‖θ‖², and without sequence i its term is missing but N is
unchanged. Its Hessian is ∇²L + λ I, so the ridge λ is the damping, and none has to be chosen. Training is
full-batch and deterministic: momentum descent from the model's initialization, then L-BFGS until the
gradient vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from curvescope.algorithms import solve
from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.errors import UsageError
from curvescope.core.operator.matrices import Matrix
from curvescope.core.result import Result
from curvescope.data.batches import IGNORED, Batch, Batches
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.mlp import MLPConfig
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.operators import GGN, KFAC, Hessian, per_sample
from curvescope.problem import Problem
from curvescope.studies.common.statistics import correlation_gain, crossed_bootstrap, mean_correlation
from curvescope.studies.landscape.analysis import subset
from curvescope.studies.problem_config import kind_of
from curvescope.tokenizers import as_tokenizer

ARROW = "=>"
SUMS = "0123456789+="  # symbols of the ids of the task addition


def held_out(problem: Problem, count: int) -> tuple[Problem, list[Problem]]:
    """Split a problem into the problem without its last sequences, and a query for each of these."""
    total = problem.batches.num_sequences
    if total <= count:
        raise UsageError(
            f"expected more sequences than the {count} that are held out as queries, got {total}",
            hint="tokens=512, or fewer num_queries",
        )
    queries = [subset(problem, np.array([i])) for i in range(total - count, total)]
    return subset(problem, np.arange(total - count)), queries


def asked(problem: Problem, texts: tuple[str, ...]) -> list[Problem]:
    """Return a query for each text: the mean loss of its tokens, or only of those after an arrow."""
    model = problem.model
    if model.tokenizer is None or kind_of(model) != "causal-lm":
        raise UsageError(
            f"expected a causal language model for a text query; {model.name!r} does not predict the "
            "next token of a text",
            hint="without query, sequences of the data are held out as queries",
        )
    return [Problem(model, _batch(model, text), problem.loss) for text in texts]


def _batch(model: Model, text: str) -> Batches:
    if text.count(ARROW) > 1:
        raise UsageError(f"expected a query of at most one {ARROW}, got {text!r}")
    tokenizer = as_tokenizer(model.tokenizer)
    before, arrow, behind = text.partition(ARROW)
    first = tokenizer.encode(before)
    ids = first + tokenizer.encode(behind)
    counted = len(first) if arrow else 1
    if len(ids) < 2 or not 1 <= counted < len(ids):
        raise UsageError(
            f"expected a query of at least two tokens, or words before and after {ARROW}, got {text!r}"
        )
    if model.n_ctx is not None and len(ids) - 1 > model.n_ctx:
        raise UsageError(f"expected a query of at most {model.n_ctx + 1} tokens, got {len(ids)}")
    targets = torch.tensor([ids[1:]])
    targets[:, : counted - 1] = IGNORED
    return Batches.from_tensors(torch.tensor([ids[:-1]]), targets, name="query")


def read(problem: Problem, name: str) -> list[str]:
    """Return a readable form of every sequence: its text, its ids, or its class."""
    return [
        _read(batch[i : i + 1], problem, name)
        for batch in problem.batches
        for i in range(batch.num_sequences)
    ]


def _read(one: Batch, problem: Problem, name: str) -> str:
    inputs, targets = one.inputs, one.targets
    if isinstance(inputs, Mapping):
        inputs = inputs.get("input_ids")
    if not isinstance(targets, Tensor):
        return "a sequence"
    if not isinstance(inputs, Tensor) or inputs.is_floating_point() or targets.shape != inputs.shape:
        return (
            f"class {int(targets)}"
            if targets.numel() == 1 and not targets.is_floating_point()
            else "a sequence"
        )
    counted = torch.nonzero(targets[0] != IGNORED)[:, 0].tolist()
    last = counted[-1] if counted else len(inputs[0]) - 1
    ids = inputs[0, : last + 1].tolist() + ([int(targets[0, last])] if counted else [])
    if problem.model.tokenizer is not None:
        return as_tokenizer(problem.model.tokenizer).decode(ids)
    return "".join(SUMS[i] for i in ids) if name == "addition" else " ".join(map(str, ids))


# ----------------------------------------------------------------------------------------------------- scores

EngineName = Literal["auto", "fast", "autograd"]


@dataclass(frozen=True)
class Scores(Result):
    """Scores s_i of S sequences for one query, at D dampings."""

    damping: np.ndarray  # (D,) δ
    values: np.ndarray  # (D, S) s_i
    error: np.ndarray  # (D, S) bound by the residual
    sequences: np.ndarray  # (S,) indices of the sequences in the data
    shares: np.ndarray  # (S,) N_i/N
    residual: np.ndarray  # (D,) ‖∇ℓ_q − (H_o + δ I) x‖ / ‖∇ℓ_q‖
    converged: np.ndarray  # (D,)
    num_products: np.ndarray  # (D,)
    query_loss: float


def score(
    problem: Problem,
    query: Problem,
    *blocks: str,
    dampings: Sequence[float],
    tol: float | None = None,
    max_products: int | None = None,
    chunk: int | None = None,
    engine: EngineName = "auto",
    checkpoint: bool = False,
) -> Scores:
    """Compute s_i of every sequence of `problem` for the loss of `query`, a problem of the same model.

    Memory: one vector over the blocks for each damping, and the gradients of the sequences of one chunk.

    Args:
        blocks: globs of the parameters that may change; all by default.
        dampings: δ, each above 0.
        tol: relative residual that counts as converged; 1e-8 in float64, 1e-4 in float32.
        max_products: maximum number of products for one system.
        chunk: sequences whose gradients are computed at once; by default as many as fit into memory.
    """
    if not len(dampings) or any(not d > 0 for d in dampings):
        raise UsageError(f"expected dampings above 0, got {list(dampings)}")
    if query.model is not problem.model:
        raise UsageError("expected a query of the same model, got one of another model")
    G = GGN(problem, *blocks, engine=engine, checkpoint=checkpoint)
    b = query.gradient(*blocks)
    found = [solve(G, b, damping=float(d), tol=tol, max_products=max_products) for d in dampings]
    X = torch.stack([one.x for one in found], dim=1)
    samples = per_sample(problem, *blocks, chunk=chunk)
    products, lengths = [], []
    for _, gradients in samples.gradient_parts():
        products.append((gradients @ X).double().cpu())
        lengths.append(gradients.double().norm(dim=1).cpu())
    delta, residual = np.array(dampings, dtype=float), np.array([float(one.residual) for one in found])
    bound = residual * float(b.double().norm()) / delta
    return Scores(
        damping=delta,
        values=torch.cat(products).numpy().T * samples.shares,
        error=bound[:, None] * torch.cat(lengths).numpy() * samples.shares,
        sequences=samples.sequences,
        shares=samples.shares,
        residual=residual,
        converged=np.array([one.converged for one in found]),
        num_products=np.array([one.num_products for one in found]),
        query_loss=query.loss_value(),
    )


# ------------------------------------------------------------------------------------------------- retraining

RATE, MOMENTUM, STEPS = 0.1, 0.9, 200  # momentum descent before L-BFGS
EVALUATIONS, FLAT = 4000, 1e-8  # L-BFGS: maximum number of gradients, and tolerance for the largest entry
FACTORS = (0.1, 10.0, 100.0)  # other dampings, in units of the ridge
GGN_NAME, HESSIAN, KFAC_NAME, GRADIENTS = "GGN", "Hessian", "K-FAC", "gradients"
CASES = {"MLP": "a multilayer perceptron on digits", "Transformer": "a Transformer on a Markov chain"}


class RetrainingCase(NamedTuple):
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


def make_case(name: str, num_queries: int, seed: int) -> RetrainingCase:
    """Build one of CASES."""
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
            norm="none",  # with a norm and a ridge, the minimum is at infinity
            init="scaled",
            seed=seed,
        )
        pairs = (data[0].inputs, data[0].targets)
    whole = Problem(load(config, dtype="float64"), pairs)
    return RetrainingCase(*held_out(whole, num_queries), ridge)


@dataclass(frozen=True)
class Minimum(Result):
    """End point of a training run."""

    theta: np.ndarray  # (n,)
    objective: float
    gradient_norm: float
    evaluations: int


@dataclass(frozen=True)
class LeftOut(Result):
    """Changes without one sequence: trained on from the minimum (near), or from the same start (again)."""

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
    left_out: list[str]  # blocks without K-FAC factors


def minimize(case: RetrainingCase, start: np.ndarray, *, steps: int, without: int | None = None) -> Minimum:
    """Run momentum descent, then L-BFGS, on the objective, optionally without one sequence."""
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


def leave_out(case: RetrainingCase, minimum: Minimum, sequence: int) -> LeftOut:
    """Train without a sequence twice: continued from the minimum, and repeated from the start."""
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


def losses(case: RetrainingCase, theta: np.ndarray) -> np.ndarray:
    """Loss of every query: (Q,)."""
    return np.array([query.at(torch.as_tensor(theta)).loss_value() for query in case.queries])


def predict(case: RetrainingCase, minimum: Minimum, factors: Sequence[float] = FACTORS) -> Predicted:
    """Predict changes with the GGN at several dampings, the Hessian, K-FAC, and without a matrix.

    GGN and Hessian are computed once as full matrices, for all systems. The scores of K-FAC keep blocks
    without factors (the positions P) fixed.
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


# ----------------------------------------------------------------------------------------------- correlations


def over_queries(predicted: np.ndarray, measured: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Mean over queries of Spearman's ρ over removals, inputs (Q, R); the bootstrap resamples both axes."""
    return mean_correlation(predicted, measured, draws=draws, seed=seed, groups=measured.shape[1])


def gain(one: np.ndarray, other: np.ndarray, measured: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Difference of this mean between two predictions, on the same resamples."""
    return correlation_gain(one, other, measured, draws=draws, seed=seed, groups=measured.shape[1])


def slope(predicted: np.ndarray, measured: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Median over all cells of measured / predicted change; 1 if the size is right.

    The median is robust: one retraining that ends at another minimum could dominate a least-squares slope.
    Cells with 0 / 0 are left out; `count` is the number of the others.
    """

    def ratio(p: np.ndarray, m: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _known_median((m / p).reshape(*m.shape[:-2], -1))

    left = int(((predicted != 0) | (measured != 0)).sum())
    return replace(
        crossed_bootstrap(ratio, predicted, measured, draws=draws, seed=seed, groups=measured.shape[1]),
        count=left,
    )


def _known_median(values: np.ndarray) -> np.ndarray:
    """Median along the last axis without nan; nan if all are nan."""
    ordered, count = np.sort(values, axis=-1), (~np.isnan(values)).sum(-1, keepdims=True)  # nan come last
    middle = [np.take_along_axis(ordered, place, -1)[..., 0] for place in ((count - 1) // 2, count // 2)]
    return (middle[0] + middle[1]) / 2
