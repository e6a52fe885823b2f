"""Weights that are removed or rounded, and what the others do about it: functions of matrices."""
