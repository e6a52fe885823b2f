"""Linear operators: what algorithms see of a network, their lazy algebra, and the vectors they take."""

from curvescope.core.operator.base import (
    LinearOperator,
    Product,
    Scaled,
    Selection,
    Sum,
    Transpose,
    check_square_symmetric,
)
from curvescope.core.operator.kinds import Vector, as_columns, check_vector
from curvescope.core.operator.matrices import Diagonal, FunctionOperator, Identity, LowRank, Matrix

__all__ = [
    "Diagonal",
    "FunctionOperator",
    "Identity",
    "LinearOperator",
    "LowRank",
    "Matrix",
    "Product",
    "Scaled",
    "Selection",
    "Sum",
    "Transpose",
    "Vector",
    "as_columns",
    "check_square_symmetric",
    "check_vector",
]
