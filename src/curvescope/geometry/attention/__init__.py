"""Attention heads as low-rank matrices: decode them into tokens, compose them, measure them on data."""
