"""What flows through a model: read at places and named points, or moved there, while it runs."""

from curvescope.models.capture.points import capture

__all__ = ["capture"]
