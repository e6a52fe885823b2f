"""curvlinops' operators and estimators with curvescope behind them: `pytest -p plugin_curvlinops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import curvlinops
import torch
from curvlinops._torch_base import CurvatureLinearOperator
from curvlinops.papyan2020traces import spectrum
from harness import Harness, ours
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.operator import FunctionOperator, Matrix

Columns = list[Tensor]  # one (*shape, k) for each parameter
PROBES = {"rademacher": "rademacher", "normal": "gaussian"}

NOT_OURS = [
    (r"_matches_naive", "compares the draws of its own random generator"),
    (r"hutchpp.*num_matvecs=3", "Hutch++ of three products has no error: ours takes six"),
    (r"Neumann.*toy", "a series for a matrix that is not symmetric, and NaN where it diverges: refused here"),
    (r"Neumann.*inv_case[13-9]", "cost: thousands of products in a test; two of its ten cases are run"),
    (r"test_FisherMC", "cost: thousands of Monte-Carlo products for every test"),
    (r"(trace/test_hutch|norm/).*num_matvecs=[23]", "cost: the same estimator with more products is run"),
    (r"test_example_verification", "runs a script of its own in another process"),
    (
        r"test_e?kfac\.py|test_inverse\.py.*KFAC",
        "its own factors of K-FAC are read or written (compared in tests/cross_library)",
    ),
]


class OneInput(nn.Module):
    """A module that takes a dictionary, as a module of the tensor in it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module({"x": x})


def problem_of(op: Any, *, loss: Any = None) -> cs.Problem:
    """The problem of one of their operators, from its own arguments."""
    module, data = op._model_func, list(op._data)
    if isinstance(data[0][0], Mapping):
        module, data = OneInput(module), [(X["x"], y) for X, y in data]
    if op._loss_func is None:  # a Jacobian
        data = [(X, module(X).detach()) for X, _ in data]
    return cs.Problem(module, data, loss or op._loss_func or nn.MSELoss())


def names_of(problem: cs.Problem, params: list[nn.Parameter]) -> list[str]:
    """The names of parameters in the problem's model, in the order that they are given in."""
    names = {id(p): name for name, p in problem.model.module.named_parameters()}
    return [names[id(p)] for p in params]


def blocks_of(problem: cs.Problem, names: list[str]) -> list[str]:
    """The blocks that lie in parameters."""
    return [name for name, block in problem.model.blocks.items() if block.parameter in names]


def gathered(space: Any, names: list[str], M: Columns) -> Tensor:
    tree = {name: m.movedim(-1, 0) for name, m in zip(names, M, strict=True)}
    return space.gather_columns(tree, M[0].shape[-1])


def scattered(space: Any, names: list[str], V: Tensor) -> Columns:
    tree = space.scatter_columns(V)
    return [tree[name].movedim(0, -1) for name in names]


def cached(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Made once for each of their operators."""

    def get(op: Any) -> Any:
        if "_ours" not in vars(op):
            op._ours = make(op)
        return op._ours

    return get


def square(
    make: Callable[..., Any], problem: Callable[[Any], cs.Problem] = problem_of
) -> Callable[..., Columns]:
    """`_matmat` by one of our operators for every block of parameters."""

    @cached
    def parts(op: Any) -> list[tuple[list[str], Any]]:
        own, start, found = problem(op), 0, []
        for size in op._block_sizes:
            names = names_of(own, op._params[start : start + size])
            found.append((names, make(op, own, *blocks_of(own, names))))
            start += size
        return found

    def matmat(op: Any, M: Columns) -> Columns:
        found, start = [], 0
        for names, A in parts(op):
            V = gathered(A.space, names, M[start : start + len(names)])
            found += scattered(A.space, names, ours(A @ V))
            start += len(names)
        return found

    return matmat


def by_rows(op: Any) -> cs.Problem:
    """A term is a row of outputs, as curvlinops has it for squared error and yes-or-no."""
    loss = op._loss_func
    if isinstance(loss, nn.CrossEntropyLoss):
        return problem_of(op)
    entries = type(loss)(reduction="none")
    own = cs.CustomLoss(
        lambda z, y, w: entries(z, y).sum(),
        lambda y, w: y.numel(),
        terms=lambda z, y: entries(z, y).sum(-1),
    )
    return problem_of(op, loss=own)


def empirical_fisher(op: Any, problem: cs.Problem, *blocks: str) -> Any:
    F = cs.EmpiricalFisher(problem, *blocks)
    custom = isinstance(problem.loss, cs.CustomLoss)
    return scaled(F, problem.num_terms) if custom and op._loss_func.reduction == "sum" else F


def scaled(A: Any, factor: float) -> Any:
    found = A * factor
    found.space = A.space
    return found


@cached
def jacobian_of(op: Any) -> tuple[list[str], cs.Jacobian]:
    problem = problem_of(op)
    names = names_of(problem, op._params)
    return names, cs.Jacobian(problem, *blocks_of(problem, names))


def jacobian(op: Any, M: Columns) -> Columns:
    names, J = jacobian_of(op)
    found = ours(J @ gathered(J.space, names, M))
    return [found.reshape(*op._out_shape[0], -1)]


def transposed_jacobian(op: Any, M: Columns) -> Columns:
    names, J = jacobian_of(op)
    return scattered(J.space, names, ours(J.T @ M[0].flatten(end_dim=-2)))


def gradient_and_loss(op: Any) -> tuple[Columns, Tensor]:
    if vars(op).get("_judging"):
        return THEIR_GRADIENT(op)
    problem = problem_of(op)
    names = names_of(problem, op._params)
    space = problem.space(*blocks_of(problem, names))
    tree = space.scatter(ours(problem.gradient(*blocks_of(problem, names))))
    return [tree[name] for name in names], torch.tensor(problem.loss_value())


def check_deterministic(op: Any) -> None:
    """Theirs, of data and modules that change from pass to pass: ours reads data once, and evaluates."""
    op._judging = True
    try:
        THEIR_CHECK(op)
    finally:
        op._judging = False


def as_ours(A: Any, *, psd: bool = False) -> Any:
    """A matrix, or one of their operators."""
    if isinstance(A, Tensor):
        return Matrix(A)
    return FunctionOperator(
        A.__matmul__, A.shape, dtype=A.dtype, device=A.device, symmetric=True, psd=psd, rmatmat=A.__matmul__
    )


def drawn() -> int:
    """A seed that follows torch's own generator."""
    return int(torch.randint(2**31, ()))


def trace(method: str) -> Callable[..., Tensor]:
    def estimate(A: Any, num_matvecs: int, distribution: str = "rademacher") -> Tensor:
        probe = PROBES[distribution]
        found = cs.trace(as_ours(A), num_probes=num_matvecs, method=method, probe=probe, seed=drawn())
        return ours(torch.tensor(found.value, dtype=A.dtype))

    return estimate


def diagonal(method: str) -> Callable[..., Tensor]:
    def estimate(A: Any, num_matvecs: int, distribution: str = "rademacher") -> Tensor:
        probe = PROBES[distribution]
        found = cs.diagonal(as_ours(A), num_probes=num_matvecs, method=method, probe=probe, seed=drawn())
        return ours(torch.as_tensor(found.values, dtype=A.dtype))

    return estimate


def squared_frobenius(A: Any, num_matvecs: int, distribution: str = "rademacher") -> Tensor:
    probe = PROBES[distribution]
    found = cs.frobenius_norm(as_ours(A), num_probes=num_matvecs, probe=probe, seed=drawn())
    return ours(torch.tensor(found.value**2, dtype=A.dtype))


def boundaries_abs(A: Any, tol: float = 1e-7, boundaries: Any = None) -> tuple[float, float]:
    ends = boundaries or (None, None)
    op = as_ours(A)
    low, high = (
        end if end is not None else abs(float(ours(cs.eigsh(op, 1, which=which, tol=1e-12).values)[0]))
        for end, which in zip(ends, ("SM", "LM"), strict=True)
    )
    return low, high


def boundaries(A: Any, tol: float = 1e-7, boundaries: Any = None) -> tuple[float, float]:
    ends = boundaries or (None, None)
    op = as_ours(A)
    low, high = (
        end if end is not None else float(ours(cs.eigsh(op, 1, which=which, tol=1e-12).values)[0])
        for end, which in zip(ends, ("SA", "LA"), strict=True)
    )
    return low, high


def submatrix(op: Any, M: Columns) -> Columns:
    A = FunctionOperator(
        op._A.__matmul__, op._A.shape, dtype=op.dtype, device=op.device, rmatmat=op._A.adjoint().__matmul__
    )
    return [ours(A.submatrix(op._row_idxs, op._col_idxs) @ M[0])]


def inverse(method: str, settings: Callable[[Any], dict[str, Any]]) -> Callable[..., Columns]:
    """`_matmat` by our solver, with what their settings say."""

    def matmat(op: Any, M: Columns) -> Columns:
        B = torch.cat([m.flatten(end_dim=-2) for m in M])
        found = cs.solve(as_ours(op._A, psd=True), B, method=method, **settings(op))
        X = ours(torch.as_tensor(found.x))
        return [x.reshape(*s, -1) for x, s in zip(X.split(op._out_shape_flat), op._out_shape, strict=True)]

    return matmat


THEIR_GRADIENT = CurvatureLinearOperator.gradient_and_loss
THEIR_CHECK = CurvatureLinearOperator._check_deterministic
CurvatureLinearOperator.gradient_and_loss = gradient_and_loss
CurvatureLinearOperator._check_deterministic = check_deterministic
curvlinops.HessianLinearOperator._matmat = square(lambda op, problem, *blocks: cs.Hessian(problem, *blocks))
curvlinops.GGNLinearOperator._matmat = square(lambda op, problem, *blocks: cs.GGN(problem, *blocks))
curvlinops.EFLinearOperator._matmat = square(empirical_fisher, by_rows)
curvlinops.JacobianLinearOperator._matmat = jacobian
curvlinops.TransposedJacobianLinearOperator._matmat = transposed_jacobian
curvlinops.SubmatrixLinearOperator._matmat = submatrix
curvlinops.CGInverseLinearOperator._matmat = inverse(
    "cg",
    lambda op: {"tol": op._cg_hyperparameters["tolerance"] / 10},  # of the residual, not of its mean
)
curvlinops.LSMRInverseLinearOperator._matmat = inverse(
    "lsmr", lambda op: {"tol": 1e-6, "max_products": 4 * op._lsmr_hyperparameters["maxiter"]}
)
curvlinops.NeumannInverseLinearOperator._matmat = inverse(
    "neumann", lambda op: {"tol": 1e-4, "max_products": op._num_terms, "scale": float(op._scale)}
)
curvlinops.hutchinson_trace = trace("hutchinson")
curvlinops.hutchpp_trace = trace("hutch++")
curvlinops.xtrace = trace("xtrace")
curvlinops.hutchinson_diag = diagonal("hutchinson")
curvlinops.xdiag = diagonal("xdiag")
curvlinops.hutchinson_squared_fro = squared_frobenius
spectrum.approximate_boundaries = boundaries
spectrum.approximate_boundaries_abs = boundaries_abs


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Harness(NOT_OURS))
