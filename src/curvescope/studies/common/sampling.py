"""Sampling errors of a study's headline numbers, and their text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from curvescope.algorithms import Eigenpairs
from curvescope.algorithms.blocks.probes import Ends, krylov_basis, ritz_ends
from curvescope.algorithms.columns import probe_batches
from curvescope.core.errors import UsageError
from curvescope.core.number_format import between, rounded
from curvescope.core.ranks import rank_and_size
from curvescope.core.result import Result
from curvescope.operators.base import CurvatureOperator
from curvescope.sampling import Sampled, Split, extremes, form_of, norm_of, split_sample, trace_of
from curvescope.sampling.errors import Measured
from curvescope.studies.problem_config import SampledOnData

NUM_GROUPS = 8  # groups of a study's sample: Student's t is 2.4, and more groups would cost more
NUM_PROBES = 4  # probes for traces and norms on groups
OFF = "sampling = false"


@dataclass(frozen=True)
class SampledNumbers(Result):
    """Headline numbers with both errors, by name; empty if they were not measured, with the reason."""

    numbers: dict[str, Sampled] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class SampledExtremes(Result):
    """Extreme eigenvalues of an operator, with both errors for the outermost."""

    pairs: Eigenpairs
    sampled: SampledNumbers


@dataclass(frozen=True)
class SampledEnds(Result):
    """Both ends of a spectrum from a few Lanczos steps, with both errors for λ_max."""

    ends: Ends
    sampled: SampledNumbers


def split_for(op: CurvatureOperator, cfg: SampledOnData) -> Split | str:
    """Split the sample of an operator for a study, or return the reason why that is not possible."""
    if not cfg.sampling:
        return OFF
    if rank_and_size()[1] > 1:
        return (
            "the data are divided among several processes; run a single process to measure the sampling error"
        )
    try:
        return split_sample(op, unit=cfg.unit, most=NUM_GROUPS)
    except UsageError as error:
        return error.message


def sampled_extremes(op: CurvatureOperator, pairs: Eigenpairs, cfg: SampledOnData) -> SampledNumbers:
    """Measure both errors of λ_max and, if the operator is indefinite, λ_min; `pairs` ascend and have
    vectors.
    """
    split = split_for(op, cfg)
    if isinstance(split, str):
        return SampledNumbers(reason=split)
    assert pairs.vectors is not None
    at = [-1] if op.psd or len(pairs.values) < 2 else [-1, 0]
    numbers = extremes(
        split,
        pairs.vectors[:, [i % len(pairs.values) for i in at]],
        pairs.residuals[at],
        ("largest",) if len(at) == 1 else ("largest", "smallest"),
        values=pairs.values[at],
    )
    names = {"largest": "lambda_max", "smallest": "lambda_min"}
    return SampledNumbers({names[end]: number for end, number in numbers.items()})


def sampled_sharpness(
    op: CurvatureOperator, cfg: SampledOnData, *, num_steps: int
) -> tuple[Ends, SampledNumbers]:
    """Measure both ends of the spectrum with `num_steps` Lanczos steps, and λ_max with both errors."""
    krylov = krylov_basis(op, num_steps, seed=cfg.seed)
    ends = ritz_ends(krylov, op)
    if not ends.values[1] > 0:
        return ends, SampledNumbers(reason="" if cfg.sampling else OFF)
    split = split_for(op, cfg)
    if isinstance(split, str):
        return ends, SampledNumbers(reason=split)
    top = torch.as_tensor(np.linalg.eigh(krylov.T[:-1])[1][:, -1:]).to(krylov.Q)
    numbers = extremes(split, krylov.Q.T @ top, ends.residuals[1:], ("largest",))
    return ends, SampledNumbers({"lambda_max": numbers["largest"]})


def sampled_sums(
    op: CurvatureOperator,
    cfg: SampledOnData,
    *,
    trace: tuple[float, float, int] | None = None,
    num_probes: int = NUM_PROBES,
) -> SampledNumbers:
    """Measure trace and Frobenius norm with both errors, from the same products with probes on groups.

    Args:
        op: The operator.
        cfg: The settings of the study.
        trace: Value, standard error and number of probes of a trace estimated from more probes.
        num_probes: Random vectors.
    """
    split = split_for(op, cfg)
    if isinstance(split, str):
        return SampledNumbers(reason=split)
    forms: list[np.ndarray] = []
    grams: list[np.ndarray] = []
    with split.frozen():
        for V in probe_batches(op, num_probes, seed=cfg.seed, first=SEED_OF_SUMS, what="sampling error"):
            some_forms, some_grams = split.forms_and_grams(V)
            forms.append(some_forms)
            grams.append(some_grams)
    measured = None if trace is None else Measured(*trace)
    return SampledNumbers(
        {
            "trace": trace_of(split, np.concatenate(forms), measured=measured),
            "norm": norm_of(split, np.concatenate(grams)),
        }
    )


def sampled_norms(op: CurvatureOperator, names: Sequence[str], cfg: SampledOnData) -> SampledNumbers:
    """Measure Frobenius norms of diagonal blocks with both errors, from probes of each block alone."""
    numbers = {}
    for name in names:
        block = op.block(name)
        split = split_for(block, cfg)
        if isinstance(split, str):
            return SampledNumbers(reason=split)
        with split.frozen():
            probes = probe_batches(
                block, NUM_PROBES, seed=cfg.seed, first=SEED_OF_SUMS, what="sampling error"
            )
            grams = np.concatenate([split.grams(V) for V in probes])
        numbers[name] = norm_of(split, grams)
    return SampledNumbers(numbers)


def sampled_loss(op: CurvatureOperator, cfg: SampledOnData) -> SampledNumbers:
    """Measure the loss with its sampling error, from a forward pass of each group."""
    split = split_for(op, cfg)
    if isinstance(split, str):
        return SampledNumbers(reason=split)
    groups = [group for group in split.groups if isinstance(group, CurvatureOperator)]
    losses = np.array([group.problem.loss_value() for group in groups])
    return SampledNumbers({"loss": form_of(split, losses, quantity="loss")})


SEED_OF_SUMS = 1000  # number of the first probe, different from those of the study's other estimates


# ------------------------------------------------------------------------------------------------------ words


def line(label: str, number: Sampled, words: str = "") -> tuple[str, str, str]:
    """Return a line of a summary: the number with one standard error, its verdict, and `words`."""
    return label, number.headline, f"{number.words}{f'; {words}' if words else ''}"


def stated(number: Sampled) -> str:
    """Return a clause such as `λ_max is 2,215 ± 170 (settled to 10 %)`."""
    return f"{number.quantity} is {number.headline} ({number.verdict()})"


def notes_of_sampling(cfg: SampledOnData, reason: str, *, text: bool) -> list[str]:
    """Return notes on the sampling errors of a result.

    Args:
        cfg: The settings of the study.
        reason: Reason why there are none; "" if they were measured.
        text: True if the data are a sample of one text.
    """
    if reason:
        return [f"no sampling error was measured: {reason}"]
    if not text:
        return []
    units = "single sequences" if cfg.unit == 1 else f"runs of {cfg.unit} consecutive sequences"
    return [
        f"sampling errors are over {units} of this text; sequences of one document are correlated, and "
        "other documents may differ by more (--set unit=4 draws four consecutive sequences together)"
    ]


def ends_of(number: Sampled, factor: float) -> str:
    """Format the 95 % interval of `factor` / number, such as `0.0011 to 0.0015`, or its magnitude."""
    if math.isnan(number.low):
        return f"about {rounded(factor / number.value, 1)}"
    return between(factor / number.high, factor / number.low, 2)


def columns_of(number: Sampled | None, name: str, value: float, numerical: float) -> dict[str, float]:
    """Table columns of a number: with both errors and its interval if a sampling error is known."""
    if number is None:
        return {name: value, f"{name}_numerical": numerical}
    return {key: item for key, item in number.columns(name).items() if not isinstance(item, str)}
