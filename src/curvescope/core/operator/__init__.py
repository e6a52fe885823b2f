"""Linear operators: the interface between networks and algorithms, lazy algebra, and kinds of vectors."""

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
