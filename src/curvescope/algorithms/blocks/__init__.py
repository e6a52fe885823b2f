"""Estimates for all blocks of an operator: norms of pairs, probes per block, distances between spectra."""
