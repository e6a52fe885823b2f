"""Blocks of attention as sums over queries of small factors: of one head, of two heads, and their algebra."""
