"""Tensor functions with fast first and second derivatives: attention, norms, activations, linear maps,
cross-entropy.
"""
