"""Compare memory, products and time of estimators with other libraries, in one run.

    python benchmarks/estimators_memory.py > benchmarks/results/estimators.md

The measurement includes making each library's own operator of the same network (three linear layers, two
million parameters, cross-entropy, 16 inputs) and running its own estimator. Memory is the additional peak of
tensors in PyTorch's record, in vectors of the network's size. Time is processor time. The other libraries are
optional: `make peers` installs them.
"""

from __future__ import annotations

import copy
import os
import platform
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import curvescope as cs

WIDTH, CLASSES, INPUTS = 1024, 10, 16
COUNT = 24  # products: even, and divisible by three
PACKAGES = {
    "curvescope": "curvescope",
    "curvlinops": "curvlinops-for-pytorch",
    "hessian-eigenthings": "hessian-eigenthings",
    "PyHessian": "pyhessian",
    "BackPACK": "backpack-for-pytorch",
}
Call = Callable[[], Any]


def network() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the network and its data, from a seed."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    ]
    return nn.Sequential(*layers), torch.randn(INPUTS, WIDTH), torch.randint(0, CLASSES, (INPUTS,))


def ours(module: nn.Module, x: Tensor, y: Tensor, count: int) -> dict[str, Call]:
    def ggn() -> cs.GGN:
        return cs.GGN(cs.Problem(module, cs.Batches([cs.Batch(x, y)])))

    return {
        "trace, Hutchinson": lambda: cs.trace(ggn(), num_probes=count),
        "trace, Hutch++": lambda: cs.trace(ggn(), num_probes=count, method="hutch++"),
        "trace, XTrace": lambda: cs.trace(ggn(), num_probes=count, method="xtrace"),
        "diagonal, Hutchinson": lambda: cs.diagonal(ggn(), num_probes=count),
        "diagonal, XDiag": lambda: cs.diagonal(ggn(), num_probes=count, method="xdiag"),
        "diagonal, roots": lambda: cs.diagonal(ggn(), num_probes=count, method="roots"),
        "squared Frobenius norm": lambda: cs.frobenius_norm(ggn(), num_probes=count),
        "GGN diagonal, exact": lambda: cs.exact_diagonal(ggn()),
    }


def curvlinops(module: nn.Module, x: Tensor, y: Tensor, count: int) -> dict[str, Call]:
    peer = import_module("curvlinops")

    def ggn() -> Any:
        params = list(module.parameters())
        return peer.GGNLinearOperator(
            module, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False
        )

    names = {
        "trace, Hutchinson": peer.hutchinson_trace,
        "trace, Hutch++": peer.hutchpp_trace,
        "trace, XTrace": peer.xtrace,
        "diagonal, Hutchinson": peer.hutchinson_diag,
        "diagonal, XDiag": peer.xdiag,
        "squared Frobenius norm": peer.hutchinson_squared_fro,
    }
    return {name: lambda f=f: f(ggn(), num_matvecs=count) for name, f in names.items()}


def eigenthings(module: nn.Module, x: Tensor, y: Tensor, count: int) -> dict[str, Call]:
    peer, loss = import_module("hessian_eigenthings"), nn.CrossEntropyLoss()
    trace = import_module("hessian_eigenthings.algorithms.trace").trace

    def ggn() -> Any:
        parts = peer.supervised_forward, peer.supervised_loss_of_output(loss)
        return peer.GGNOperator(module, [(x, y)], *parts)

    return {
        "trace, Hutchinson": lambda: trace(ggn(), num_matvecs=count, method="hutchinson"),
        "trace, Hutch++": lambda: trace(ggn(), num_matvecs=count, method="hutch++"),
    }


def pyhessian(module: nn.Module, x: Tensor, y: Tensor, count: int) -> dict[str, Call]:
    peer = import_module("pyhessian")

    def run() -> None:
        with warnings.catch_warnings(action="ignore"):
            operator = peer.hessian(copy.deepcopy(module), nn.CrossEntropyLoss(), data=(x, y), cuda=False)
            operator.trace(maxIter=count, tol=-float("inf"))  # otherwise a sign change stops it early

    return {"trace, Hutchinson": run}  # of the Hessian, because PyHessian has no GGN


def backpack(module: nn.Module, x: Tensor, y: Tensor, count: int) -> dict[str, Call]:
    peer, extensions = import_module("backpack"), import_module("backpack.extensions")

    def run() -> None:
        net, loss = peer.extend(copy.deepcopy(module)), peer.extend(nn.CrossEntropyLoss())
        with peer.backpack(extensions.DiagGGNExact()):
            loss(net(x), y).backward()

    return {"GGN diagonal, exact": run}


LIBRARIES = {
    "curvescope": ours,
    "curvlinops": curvlinops,
    "hessian-eigenthings": eigenthings,
    "PyHessian": pyhessian,
    "BackPACK": backpack,
}


def measured(call: Call, size: int) -> tuple[float, float]:
    """Return the vectors at the peak, and the processor seconds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    live = most = 0
    recorder: Any = recorded.profiler
    events = recorder.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    start = time.process_time()
    call()
    return most / (4 * size), time.process_time() - start


def table(count: int) -> str:
    """Return one row per estimator and one column per installed library."""
    module, x, y = network()
    size = sum(p.numel() for p in module.parameters())
    calls = {}
    for name, make in LIBRARIES.items():
        try:
            calls[name] = make(module, x, y, count)
        except ImportError:
            print(f"{name} is not installed.\n")
    rows = ["| | " + " | ".join(calls) + " |", "|---" * (len(calls) + 1) + "|"]
    for estimator in calls["curvescope"]:
        cells = []
        for estimators in calls.values():
            cell = measured(estimators[estimator], size) if estimator in estimators else None
            cells.append("" if cell is None else f"{cell[0]:.1f} ({cell[1]:.2f} s)")
        rows.append(f"| {estimator} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    versions = {name: _version(package) for name, package in PACKAGES.items()}
    installed = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    module, _, _ = network()
    size = sum(p.numel() for p in module.parameters())
    print("# Memory of the estimators\n")
    print(f"`benchmarks/estimators_memory.py`: {installed}; torch {torch.__version__}, one thread of")
    print(
        f"{platform.machine()} with {os.cpu_count()} cores. A network of {size:,} parameters, {INPUTS} inputs"
    )
    print(
        f"and {CLASSES} classes, float32; GGN, of PyHessian the Hessian. Cells: vectors of the network's size"
    )
    print("at the peak, the operator and all that it keeps included (and seconds of the processor).")
    print(f"{COUNT} products each.\n\n{table(COUNT)}")


if __name__ == "__main__":
    main()
