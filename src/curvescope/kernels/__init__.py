"""Tensor functions with fast first and second derivatives."""
