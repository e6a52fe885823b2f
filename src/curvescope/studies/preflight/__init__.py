"""Forecast of a run's time and memory, from its plan and from a few measured products."""

from curvescope.studies.preflight.prediction import Forecast, forecast

__all__ = ["Forecast", "forecast"]
