"""Causal networks of one head without biases, for sweeps: many probes at once, exact norms at the end."""
