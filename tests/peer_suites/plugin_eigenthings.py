"""hessian-eigenthings' classes and functions with curvescope behind them: `pytest -p plugin_eigenthings`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import hessian_eigenthings
import torch
from harness import Harness, ours
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.operator import FunctionOperator

NOT_OURS = [
    (r"test_large_n_memory", "memory of its own algorithms; ours is measured in tests/algorithms"),
    (r"runs_on_(tiny_gpt2|solu_1l)", "downloads a model"),
    (r"test_ddp_hessian", "its own processes of torch.distributed"),
]
lanczos_module = import_module("hessian_eigenthings.algorithms.lanczos")
power_module = import_module("hessian_eigenthings.algorithms.power_iteration")
trace_module = import_module("hessian_eigenthings.algorithms.trace")
density_module = import_module("hessian_eigenthings.algorithms.spectral_density")
THEIR_LANCZOS, THEIR_POWER = lanczos_module.lanczos, power_module.deflated_power_iteration
THEIR_DENSITY, THEIR_TRACE = density_module.spectral_density, trace_module.trace


class Whole(nn.Module):
    """A module whose outputs are a function of it and of one batch."""

    def __init__(self, module: nn.Module, outputs: Callable[[nn.Module], Tensor]):
        super().__init__()
        self.module, self.outputs = module, outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.module)


def product(make: Any, problem: cs.Problem, op: Any, v: Tensor) -> Tensor:
    """A v over the parameters that their operator has, in its order."""
    own = {id(p): name for name, p in problem.model.module.named_parameters()}
    names = [own[id(p)] for p in op._param_list]
    blocks = [name for name, block in problem.model.blocks.items() if block.parameter in names]
    A = make(problem, *blocks)
    parts = [part.view_as(p) for part, p in zip(v.split(op._sizes), op._param_list, strict=True)]
    found = A.space.scatter(ours(A @ A.space.gather(dict(zip(names, parts, strict=True)))))
    return torch.cat([found[name].flatten() for name in names])


def hessian(op: Any, v_split: list[Tensor], batch: Any) -> Tensor:
    v = torch.cat([part.flatten() for part in v_split])
    batch = tuple(batch) if isinstance(batch, list) else batch
    return product(cs.Hessian, cs.Problem(op.model, batch, loss_fn=op.loss_fn), op, v)


def one_batch(op: Any, outputs: Callable[[nn.Module], Tensor], loss: cs.CustomLoss) -> cs.Problem:
    nothing = torch.zeros(1, 1, dtype=op.dtype, device=op.device)
    return cs.Problem(Whole(op.model, outputs), (nothing, nothing), loss)


def ggn(op: Any, v: Tensor, batch: Any) -> Tensor:
    loss = cs.CustomLoss(lambda z, y, w: op.loss_of_output_fn(z, batch), lambda y, w: 1)
    return product(cs.GGN, one_batch(op, lambda m: op.forward_fn(m, batch), loss), op, v)


def empirical_fisher(op: Any, v: Tensor, batch: Any) -> Tensor:
    """Outputs are the losses of samples, and each of them is a term."""
    samples = list(zip(*batch, strict=True))
    loss = cs.CustomLoss(lambda z, y, w: z.sum(), lambda y, w: len(samples), terms=lambda z, y: z)

    def losses(module: nn.Module) -> Tensor:
        return torch.stack([op.per_sample_loss_fn(module, sample) for sample in samples])

    return product(cs.EmpiricalFisher, one_batch(op, losses, loss), op, v)


def as_ours(op: Any) -> FunctionOperator:
    """One of their operators, column by column."""

    def columns(V: Tensor) -> Tensor:
        return torch.stack([op.matvec(v) for v in V.T], dim=1)

    return FunctionOperator(columns, (op.size, op.size), dtype=op.dtype, device=op.device, symmetric=True)


def eigenpairs(op: Any, k: int, which: str, tol: float, products: int, seed: int | None) -> Any:
    found = cs.eigsh(as_ours(op), k, which=which, tol=tol, max_products=products, seed=seed or 0)
    return hessian_eigenthings.EigenResult(
        eigenvalues=ours(torch.as_tensor(found.values, dtype=op.dtype)),
        eigenvectors=torch.as_tensor(found.vectors).T,
        residuals=torch.as_tensor(found.residuals, dtype=op.dtype),
        iterations=found.num_products,
        converged=torch.as_tensor(found.converged_mask),
    )


def lanczos(op: Any, *, k: int = 10, max_iter: int | None = None, **options: Any) -> Any:
    """`max_iter` is the number of products; wrong arguments are refused by their own checks."""
    steps = min(2 * k, op.size - 1) if max_iter is None else max_iter
    if not 1 <= k <= steps <= op.size:
        return THEIR_LANCZOS(op, k=k, max_iter=max_iter, **options)
    options = {"which": "LM", "tol": 1e-4, "seed": 0, **options}
    return eigenpairs(op, k, options["which"], options["tol"], max(steps, 2 * k), options["seed"])


def deflated_power_iteration(op: Any, *, k: int = 10, **options: Any) -> Any:
    if not 1 <= k <= op.size:
        return THEIR_POWER(op, k=k, **options)
    options = {"max_iter": 100, "tol": 1e-4, "seed": 0, **options}
    return eigenpairs(op, k, "LM", options["tol"], k * options["max_iter"], options["seed"])


def power_iteration_one(op: Any, **options: Any) -> tuple[float, Tensor, float, int, bool]:
    found = deflated_power_iteration(op, k=1, **options)
    value, residual = float(found.eigenvalues[0]), float(found.residuals[0])
    return value, found.eigenvectors[0], residual, found.iterations, bool(found.converged[0])


def estimate(op: Any, num: int, method: str, probe: str, seed: int | None) -> Any:
    found = cs.trace(as_ours(op), num_probes=num, method=method, probe=probe, seed=seed or 0)
    return hessian_eigenthings.TraceResult(
        estimate=ours(found.value), stderr=found.stderr, samples=torch.as_tensor(found.samples)
    )


def hutchinson(
    op: Any,
    *,
    num_samples: int = 100,
    distribution: str = "rademacher",
    seed: Any = None,
    backend: Any = None,
) -> Any:
    return estimate(op, num_samples, "hutchinson", distribution, seed)


def hutch_plus_plus(op: Any, *, num_matvecs: int = 99, seed: int | None = None, backend: Any = None) -> Any:
    return estimate(op, num_matvecs, "hutch++", "rademacher", seed)


def spectral_density(op: Any, *, num_runs: int = 10, lanczos_steps: int = 80, **options: Any) -> Any:
    if num_runs < 1 or not 1 <= lanczos_steps <= op.size:
        return THEIR_DENSITY(op, num_runs=num_runs, lanczos_steps=lanczos_steps, **options)
    found = cs.spectral_density(
        as_ours(op),
        num_probes=num_runs,
        num_steps=lanczos_steps,
        grid=options.get("num_grid_points", 10000),
        width=options.get("sigma"),
        seed=options.get("seed") or 0,
    )
    return hessian_eigenthings.SpectralDensityResult(
        grid=torch.as_tensor(found.grid),
        density=ours(torch.as_tensor(found.density)),
        raw_eigenvalues=torch.as_tensor(found.nodes),
        raw_weights=torch.as_tensor(found.weights),
        sigma=found.width,
    )


hessian_eigenthings.HessianOperator._hvp_autograd = hessian
hessian_eigenthings.GGNOperator._matvec_one_batch = ggn
hessian_eigenthings.EmpiricalFisherOperator._matvec_one_batch = empirical_fisher
for home, function in (
    (lanczos_module, lanczos),
    (power_module, deflated_power_iteration),
    (power_module, power_iteration_one),
    (trace_module, hutchinson),
    (trace_module, hutch_plus_plus),
    (density_module, spectral_density),
):
    for where in (home, hessian_eigenthings.algorithms, hessian_eigenthings):
        setattr(where, function.__name__, function)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Harness(NOT_OURS))
