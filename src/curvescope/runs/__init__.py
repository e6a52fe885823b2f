"""Run folders, pieces that are worked through, and resuming: what studies and papers share."""
