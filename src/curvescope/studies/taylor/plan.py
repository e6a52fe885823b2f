"""What the study costs, and smaller ones: fewer points and steps first, then no settled point."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan, Step
from curvescope.studies.taylor.study import Config

LOSS, GRADIENT, THIRD = 0.3, 0.7, 5.0  # in products
RADII = 35  # losses of a line besides its grid: for rounding and radii
SHARPEST = 40  # products for the top eigenvectors


def cost(cfg: Config, problem: Problem) -> Cost:
    """Losses along lines and on the plane, third derivatives, Lanczos, and steps of descent."""
    lines = 2 + cfg.update + cfg.num_top + cfg.num_random
    each = LOSS * (cfg.num_points + RADII) + GRADIENT + 1 + THIRD * cfg.cubic
    plane = LOSS * cfg.plane_points**2
    step, places = LOSS + GRADIENT, 2 if cfg.settle else 1
    taken = places * cfg.num_steps * (1 + step * len(cfg.shares)) if cfg.shares else 0.0
    after = SHARPEST / 2 * len(cfg.shares)
    settled = (step * cfg.fit_steps + SHARPEST + each) if cfg.settle and cfg.shares else 0.0
    pieces = 1 + lines + bool(cfg.plane_points) + (places * (1 + len(cfg.shares)) + 3)
    return Cost(pieces, SHARPEST + lines * each + plane + taken + after + settled)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same by what is taken: products, gradients, losses."""
    lines = 2 + cfg.update + cfg.num_top + cfg.num_random
    places = 2 if cfg.settle and cfg.shares else 1
    taken = places * cfg.num_steps * len(cfg.shares)
    fitted = cfg.fit_steps if places == 2 else 0
    products = places * (SHARPEST + cfg.num_steps * bool(cfg.shares)) + SHARPEST / 2 * len(cfg.shares)
    losses = (lines + places - 1) * (cfg.num_points + RADII) + cfg.plane_points**2 + taken
    return [
        Step("eigenvectors and predictions", "hessian", products, basis=SHARPEST),
        Step("along lines", "hessian", (lines + places - 1) * (1 + THIRD * cfg.cubic)),
        Step("losses", "loss", losses),
        Step("gradients", "gradient", lines + taken + fitted),
    ]


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"plane_points": 7, "num_points": 11},
        {"plane_points": 7, "num_points": 11, "num_steps": 20, "num_top": 1},
        {"plane_points": 5, "num_points": 9, "num_steps": 10, "num_top": 1, "settle": 0.0, "cubic": False},
        {
            "tokens": 64, "plane_points": 0, "num_points": 7, "num_steps": 5, "num_top": 1, "settle": 0.0,
            "cubic": False, "update": False,
        },
    ),
    steps,
)  # fmt: skip
