"""How a product is executed: one engine, put together from what is watched, run, kept and replayed."""

from curvescope.engines.engine import Engine, EngineName, Middle, Receive, Tree

__all__ = ["Engine", "EngineName", "Middle", "Receive", "Tree"]
