"""Curvature while a model is trained: measured when due and when the budget allows, without a trace."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "CurvatureMonitor": "monitor",
    "Monitored": "result",
    "RunFinding": "diagnosis",
    "RunHistory": "run_history",
    "StableRate": "run_history",
    "diagnose_run": "diagnosis",
    "lightning_callback": "callbacks",
    "read_run": "run_history",
    "stable_rate": "run_history",
    "trainer_callback": "callbacks",
}

__all__ = [
    "CurvatureMonitor",
    "Monitored",
    "RunFinding",
    "RunHistory",
    "StableRate",
    "diagnose_run",
    "lightning_callback",
    "read_run",
    "stable_rate",
    "trainer_callback",
]


def __getattr__(name: str) -> Any:
    """Import the module of a name when the name is used: the diagnosis does not need torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'curvescope.monitor' has no attribute {name!r}")
    return getattr(import_module(f"curvescope.monitor.{_MODULE_OF[name]}"), name)


if TYPE_CHECKING:
    from curvescope.monitor.callbacks import lightning_callback, trainer_callback
    from curvescope.monitor.diagnosis import RunFinding, diagnose_run
    from curvescope.monitor.monitor import CurvatureMonitor
    from curvescope.monitor.result import Monitored
    from curvescope.monitor.run_history import RunHistory, StableRate, read_run, stable_rate
