"""Engines: how the product of a problem is executed."""

from curvescope.engines.engine import Engine, EngineName
from curvescope.engines.product_forms import (
    GaussNewton,
    ProductForm,
    Sandwich,
    SecondDerivative,
    SourceTerm,
)

__all__ = [
    "Engine",
    "EngineName",
    "GaussNewton",
    "ProductForm",
    "Sandwich",
    "SecondDerivative",
    "SourceTerm",
]
