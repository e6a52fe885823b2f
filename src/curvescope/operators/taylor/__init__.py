"""Taylor expansions of a loss: the third derivative, along a line, over a plane."""

from curvescope.operators.taylor.directions import filter_normalized
from curvescope.operators.taylor.expansion import Agreement, Expansion, Radius
from curvescope.operators.taylor.line import LossLine, loss_line
from curvescope.operators.taylor.plane import LossPlane, loss_plane
from curvescope.operators.taylor.third_derivative import ThirdDerivative, third_derivative

__all__ = [
    "Agreement",
    "Expansion",
    "LossLine",
    "LossPlane",
    "Radius",
    "ThirdDerivative",
    "filter_normalized",
    "loss_line",
    "loss_plane",
    "third_derivative",
]
