"""Sampling errors: how much a number would change on other data of the same kind and size."""

from curvescope.sampling.errors import (
    eigenvalue_error,
    extremes,
    form_of,
    norm_of,
    sampling_error,
    sampling_errors,
    trace_of,
)
from curvescope.sampling.groups import Split, split_sample
from curvescope.sampling.ranking import Ranking, rank
from curvescope.sampling.sample_size import (
    SampleSize,
    SizeCheck,
    check_sample_sizes,
    sample_size,
    sample_sizes,
    size_from,
)
from curvescope.sampling.statistics import Sampled, half_of_difference, log_ratio

__all__ = [
    "Ranking",
    "SampleSize",
    "Sampled",
    "SizeCheck",
    "Split",
    "check_sample_sizes",
    "eigenvalue_error",
    "extremes",
    "form_of",
    "half_of_difference",
    "log_ratio",
    "norm_of",
    "rank",
    "sample_size",
    "sample_sizes",
    "sampling_error",
    "sampling_errors",
    "size_from",
    "split_sample",
    "trace_of",
]
