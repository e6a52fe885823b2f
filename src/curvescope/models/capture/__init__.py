"""Read or change the tensors inside a model at named points while it runs."""

from curvescope.models.capture.activation_points import capture

__all__ = ["capture"]
