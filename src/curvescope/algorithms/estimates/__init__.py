"""Estimates from random probes, with intervals: traces, diagonals, norms."""
