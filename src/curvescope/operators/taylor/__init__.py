"""Taylor expansions of a loss: the third derivative, along a line, over a plane."""

from curvescope.operators.taylor.directions import filter_normalised
from curvescope.operators.taylor.expansion import Agreement, Expansion, Radius
from curvescope.operators.taylor.line import Line, line
from curvescope.operators.taylor.plane import Plane, plane
from curvescope.operators.taylor.third_derivative import ThirdDerivative, third_derivative

__all__ = [
    "Agreement",
    "Expansion",
    "Line",
    "Plane",
    "Radius",
    "ThirdDerivative",
    "filter_normalised",
    "line",
    "plane",
    "third_derivative",
]
