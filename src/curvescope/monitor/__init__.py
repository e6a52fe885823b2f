"""Curvature while a model is trained: measured when due and when the budget allows, without a trace."""

from curvescope.monitor.callbacks import lightning_callback, trainer_callback
from curvescope.monitor.monitor import CurvatureMonitor
from curvescope.monitor.result import Monitored

__all__ = ["CurvatureMonitor", "Monitored", "lightning_callback", "trainer_callback"]
