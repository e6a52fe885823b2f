"""The sharpness that an optimizer sees, where a person names it and says as much of its state as is known.

SGD, with or without momentum, sees λ_max itself. Adam divides by √v: v is read from a file that
`torch.save(optimizer.state_dict(), file)` wrote, or it is the mean of squared gradients over disjoint parts
of the data, which is where v goes at these weights with batches of that size. Parameters are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.algorithms import Sharpness, preconditioned_sharpness
from curvescope.algorithms.stability.descent import Descent
from curvescope.core.errors import UsageError
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.studies.diagnose.measured.curvature import Effort, Whole
from curvescope.studies.sinks.study import cut_texts

Name = Literal["sgd", "adam", "adamw"]
KINDS: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
TOL, MOST = 1e-2, 60  # of the preconditioned λ_max: relative, and products
MANY = 10_000  # steps of a fresh Adam: its running means have settled
MEASURED = "its second moments are those of gradients on {} disjoint parts of the data"


def sgd_sharpness(whole: Whole, momentum: float, seed: int) -> Sharpness:
    """From the spectrum that is known already."""
    if not 0 <= momentum < 1:
        raise UsageError(f"momentum: expected at least 0 and below 1, got {momentum:g}")
    descent, ends = Descent("", None, None, momentum), whole.lines.ends()
    top, error = float(ends.top[0]), float(ends.top_error[0])
    return Sharpness(
        value=top,
        residual=error,
        converged=error <= TOL * abs(top),
        max_learning_rate=descent.threshold / top if top > 0 else float("inf"),
        learning_rate=float("nan"),
        formula=descent.formula,
        momentum=momentum,
        optimizer=f"SGD with momentum {momentum:g}" if momentum else "SGD",
        assumed=["every step uses the gradient of this data"],
        num_products=0,
        tol=TOL,
        seed=seed,
    )


def adam_sharpness(
    problem: Problem, name: Name, state: str | None, effort: Effort, lr: float | None = None
) -> Sharpness:
    """Of P^(−½) H P^(−½), with P from a file or from gradients.

    A schedule that has ended leaves learning rates of zero in its file; `lr` is taken for them.
    """
    optimizer = KINDS[name](list(problem.model.parameters()), lr=1.0, weight_decay=0.0)
    words = []
    if state is None:
        parts = cut_texts(problem, effort.num_parts)
        fill(optimizer, problem, parts)
        words.append(MEASURED.format(len(parts)))
    else:
        read_state(optimizer, problem, state)
        if lr is not None and not any(float(group["lr"]) > 0 for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["lr"] = lr
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    found = preconditioned_sharpness(H, optimizer, tol=TOL, max_products=MOST, seed=effort.seed)
    return _told(found, words, known=state is not None)


def _told(found: Sharpness, words: list[str], *, known: bool) -> Sharpness:
    rate = found.learning_rate if known else float("nan")
    return replace(found, learning_rate=rate, assumed=[*found.assumed, *words])


def fill(optimizer: torch.optim.Optimizer, problem: Problem, parts: Sequence[Problem]) -> None:
    """Give a fresh Adam the second moments of the parts' gradients, as after many steps."""
    squares: Tensor = torch.stack([part.gradient().square() for part in parts]).mean(0)
    for name, v in problem.space().scatter(squares).items():
        p = problem.model.get_parameter(name)
        optimizer.state[p] = {
            "step": torch.tensor(float(MANY)),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": v.detach(),
        }


def read_state(optimizer: torch.optim.Optimizer, problem: Problem, file: str) -> None:
    """Load what `optimizer.state_dict()` was, of all parameters of the model.

    Parameters are numbered there as they were given: in the order of the model, or, where there were groups
    with and without weight decay, matrices first. Shapes tell which.
    """
    try:
        saved = torch.load(Path(file), map_location=problem.device, weights_only=True)
        groups, entries = saved["param_groups"], saved["state"]
        shapes = [tuple(entries[i]["exp_avg_sq"].shape) for group in groups for i in group["params"]]
    except Exception as error:
        raise UsageError(
            f"optimizer_state: expected the state_dict of an Adam that took a step, could not read {file}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="torch.save(optimizer.state_dict(), 'optimizer.pt')",
        ) from error
    own = list(problem.model.parameters())
    orders = [own, [p for p in own if p.dim() > 1] + [p for p in own if p.dim() <= 1]]
    fitting = next((order for order in orders if [tuple(p.shape) for p in order] == shapes), None)
    if fitting is None:
        raise UsageError(
            f"optimizer_state: expected {len(own)} parameters with the shapes of {problem.model.name}, in "
            "its "
            f"order or matrices first, got {len(shapes)} others in {file}"
        )
    numbered = zip(fitting, [i for group in groups for i in group["params"]], strict=True)
    of = {i: p for p, i in numbered}
    for i, p in of.items():
        optimizer.state[p] = entries[i]
    own_settings = optimizer.param_groups[0]
    optimizer.param_groups = [
        {**own_settings, **group, "params": [of[i] for i in group["params"]]} for group in groups
    ]
