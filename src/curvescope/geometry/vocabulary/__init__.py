"""Tokens of a model: names, words, reference rows for directions, states, and nearest-token search."""
