"""The spectrum of a model: density, extreme eigenvalues, traces and norms of every block."""

from curvescope.studies.spectrum.study import Config, Part, Spectrum, run

__all__ = ["Config", "Part", "Spectrum", "run"]
