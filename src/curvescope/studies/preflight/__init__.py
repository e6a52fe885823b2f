"""What a run will take, before it is begun: seconds and bytes, from its plan and one measured product."""

from curvescope.studies.preflight.prediction import Forecast, forecast

__all__ = ["Forecast", "forecast"]
