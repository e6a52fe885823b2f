"""What tests share, by one name.

Small problems (`cases.py`), their dense truths (`dense.py`), modules that are refused (`refused.py`), draws.
"""

from cases import (
    CASE,
    CASES,
    NAMES,
    Bench,
    Case,
    NormedMLP,
    PlainNet,
    as_batches,
    bench,
    cut,
    drawn,
    make_data,
    shaken,
    transformer,
)
from dense import (
    TERMS,
    Data,
    Dense,
    as_package_loss,
    double_backward_hessian,
    head_of,
    relative_error,
    slice_of_head,
    weighted_terms,
)
from draws import normal, whole_number
from refused import FusedAttention, SquaredOnce

__all__ = [
    "CASE",
    "CASES",
    "NAMES",
    "TERMS",
    "Bench",
    "Case",
    "Data",
    "Dense",
    "FusedAttention",
    "NormedMLP",
    "PlainNet",
    "SquaredOnce",
    "as_batches",
    "as_package_loss",
    "bench",
    "cut",
    "double_backward_hessian",
    "drawn",
    "head_of",
    "make_data",
    "normal",
    "relative_error",
    "shaken",
    "slice_of_head",
    "transformer",
    "weighted_terms",
    "whole_number",
]
