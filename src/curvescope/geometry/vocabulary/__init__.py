"""Tokens of a model: names, words, rows to compare directions with, states, and the search among them."""
