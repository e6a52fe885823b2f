"""Paths of tokens through a model on the sphere of normalized states, read by the logit lens."""
