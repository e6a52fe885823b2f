"""Heads as low-rank matrices: read from a model, checked, decoded into tokens, composed, weighed on data."""
