"""Verification of a run's operators before it measures anything."""
