"""Taylor expansions of a loss: the third derivative, along a line, over a plane."""

from curvescope.operators.taylor.third_derivative import ThirdDerivative, third_derivative

__all__ = ["ThirdDerivative", "third_derivative"]
