"""Words as probes of heads: which keys a word's query looks for, and what its value writes."""

from curvescope.studies.probes.study import Config, Probes, run

__all__ = ["Config", "Probes", "run"]
