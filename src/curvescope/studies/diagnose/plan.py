"""What a diagnosis costs, and cheaper ones: without ceilings of single blocks first, then fewer tokens."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan, Step
from curvescope.studies.diagnose.measured.curvature import matrices
from curvescope.studies.diagnose.optimizer import MOST
from curvescope.studies.diagnose.study import Config
from curvescope.studies.sinks.lines import basis_length
from curvescope.studies.steps import Part, lanczos, together

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated
PIECES = 7  # without that of the blocks
SAMPLE = 3  # products that a probe takes on every sequence by itself


def cost(cfg: Config, problem: Problem) -> Cost:
    """Products over all tokens: those on a part of the data count as their share."""
    count = len(matrices(problem)) if cfg.block_steps else 0
    adam = MOST if cfg.optimizer != "sgd" else 0
    whole = cfg.num_probes * cfg.num_steps + cfg.num_shared + cfg.part_steps + adam
    samples = SAMPLE * cfg.num_sample_probes
    graphs = 3 + count
    return Cost(
        PIECES + (cfg.block_steps > 0), whole + samples + OF_BLOCK * cfg.block_steps * count, graphs=graphs
    )


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step; every piece has an operator of its own."""
    whole, probes, length = Part(problem, "hessian"), cfg.num_probes, cfg.num_steps
    basis = basis_length(whole.operator, probes, length)
    ends = together("both ends", [whole], probes * length, columns=probes, basis=basis)
    found = [
        ends,
        Step("rows of blocks", "hessian", cfg.num_shared),
        lanczos("parts of the data", whole, cfg.part_steps),
        Step("single sequences", "ggn", SAMPLE * cfg.num_sample_probes),
        Step("gradients", "gradient", 3),
    ]
    if cfg.optimizer != "sgd":
        found.append(Step("the sharpness that Adam sees", "hessian", MOST))
    if cfg.block_steps:
        parts = [whole._replace(space=(name,)) for name in matrices(problem)]
        count = cfg.block_steps * len(parts)
        found.append(together("ceilings of blocks", parts, count, basis=cfg.block_steps + 1))
    return [step._replace(made=1, alone=True) for step in found]


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"block_steps": 4},
        {"block_steps": 0},
        {"block_steps": 0, "num_probes": 2, "num_steps": 10, "num_shared": 3, "num_sample_probes": 2},
        {
            "block_steps": 0, "num_probes": 2, "num_steps": 8, "num_shared": 2, "num_sample_probes": 2,
            "part_steps": 6, "tokens": 256,
        },
        {
            "block_steps": 0, "num_probes": 2, "num_steps": 8, "num_shared": 2, "num_sample_probes": 2,
            "part_steps": 6, "tokens": 128, "seq_len": 32,
        },
    ),
    steps,
)  # fmt: skip
