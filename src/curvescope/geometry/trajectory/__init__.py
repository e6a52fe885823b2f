"""Paths of tokens through a model on the sphere of normalised states, and what is read on the way."""
