"""`curvescope doctor`: check which packages and devices are present and work."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from curvescope import __version__
from curvescope.cli import printing
from curvescope.core.requirements import requirements
from curvescope.core.threads import thread_slowdown
from curvescope.data.batches import Batches
from curvescope.engines import EngineName
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import Hessian
from curvescope.problem import Problem

USES = {
    "transformers": "Hugging Face models",
    "datasets": "Hugging Face datasets",
    "peft": "LoRA and other adapters",
    "transformer-lens": "TransformerLens models",
    "umap-learn": "UMAP pictures",
    "tensorboard": "writer of the monitor",
    "wandb": "writer of the monitor",
    "lightning": "callback of the monitor",
}
"""Purpose of each optional package."""
SLOWER = 2.0  # largest time of all threads, divided by that of one thread, that is not reported
INTERNAL = ("dev", "docs")  # extras that no command needs
PEERS = ("hessian-eigenthings", "curvlinops-for-pytorch")
ASSETS = ("stories260K", "stories15M", "gpt-nano-sort", "gpt2-attention", "gpt2-tokenizer")


def show(*, as_json: bool) -> bool:
    """Print the results of the checks. Return True if everything that is needed works."""
    rows = [*_packages(), *_devices(), threads_row(torch.get_num_threads(), thread_slowdown()), *_assets()]
    if as_json:
        printing.as_json([{"what": name, "state": state, "words": details} for name, state, details in rows])
    else:
        printing.table(["what", "state", ""], rows)
    return all(state != "broken" for _, state, _ in rows)


def _packages() -> list[tuple[str, str, str]]:
    rows = [("curvescope", "ok", __version__), ("python", "ok", platform.python_version())]
    try:
        rows += [
            _package(requirement.name, requirement.extra)
            for requirement in requirements()
            if requirement.extra not in INTERNAL
        ]
    except PackageNotFoundError:
        rows.append(("dependencies", "absent", "unknown: curvescope is imported from source, not installed"))
    for name in PEERS:
        installed = _version(name)
        rows.append(
            (
                name,
                "absent" if installed is None else "ok",
                f"{installed or ''} (comparison, make peers)".strip(),
            )
        )
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    rows.append(("C compiler", "ok" if compiler else "absent", "for torch.compile"))
    return rows


def _package(name: str, extra: str) -> tuple[str, str, str]:
    installed = _version(name)
    if not extra:
        return name, "broken" if installed is None else "ok", installed or "required, but not installed"
    words = f"({USES[name]}, extra '{extra}')" if name in USES else f"(extra '{extra}')"
    return name, "absent" if installed is None else "ok", f"{installed or ''} {words}".strip()


def _devices() -> list[tuple[str, str, str]]:
    """Compare the Hessian of a tiny model on every device and engine with a finite difference."""
    rows = []
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for device in devices:
        name = torch.cuda.get_device_name(device) if device != "cpu" else f"{torch.get_num_threads()} threads"
        for engine in ("fast", "autograd"):
            error = _product_error(device, engine)
            state = "ok" if error < 1e-6 else "broken"
            words = f"{name}; finite difference differs by {error:.1e}"
            rows.append((f"engine {engine} on {device}", state, words))
    return rows


def _product_error(device: str, engine: EngineName) -> float:
    """Relative difference of H v and (∇L(θ + ε v) − ∇L(θ − ε v)) / 2ε in float64."""
    config = TransformerConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, vocab_size=5, n_ctx=4, init="scaled")
    model = load(Transformer(config), dtype="float64", device=device)
    x = torch.arange(12).reshape(3, 4) % 5
    problem = Problem(model, Batches.from_tensors(x, (x + 1) % 5, batch_size=2))
    H = Hessian(problem, engine=engine)
    v = torch.linspace(-1, 1, H.shape[0], dtype=H.dtype, device=H.device)
    gradients, step = [], 1e-5
    for sign in (1, -1):
        shifted = load(Transformer(config), dtype="float64", device=device)
        with torch.no_grad():
            for name, shift in H.space.scatter(v).items():
                shifted.get_parameter(name).add_(shift, alpha=sign * step)
        gradients.append(Problem(shifted, problem.batches).gradient())
    difference = (gradients[0] - gradients[1]) / (2 * step)
    return float((H @ v - difference).norm() / difference.norm())


def threads_row(num_threads: int, slowdown: float) -> tuple[str, str, str]:
    """Return the row about threads, from the time of a product with all threads divided by that with one."""
    if slowdown <= SLOWER:
        return "threads", "ok", f"{num_threads} threads take {slowdown:.2f} times as long as one"
    words = f"{num_threads} threads take {slowdown:.0f} times as long as one: the machine is busy"
    return "threads", "slow", f"{words}; set OMP_NUM_THREADS=1"


def _assets() -> list[tuple[str, str, str]]:
    root = os.environ.get("CURVESCOPE_ASSETS")
    if root is None:
        return []  # only the tests of this package need them
    return [
        (f"test model {name}", "ok" if (Path(root) / name).is_dir() else "absent", "in CURVESCOPE_ASSETS")
        for name in ASSETS
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
