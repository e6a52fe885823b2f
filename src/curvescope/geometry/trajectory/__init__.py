"""Paths of tokens through a model on the sphere of normalized states, and what is read on the way."""
