"""Atomic files and the journal of single products."""
