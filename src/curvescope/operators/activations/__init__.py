"""Curvature of the loss in activations: in the stream, in heads' outputs, in the embeddings of an input."""

from curvescope.operators.activations.operator import ActivationGGN, ActivationHessian, ActivationOperator
from curvescope.operators.activations.tokens import TokenBlocks

__all__ = ["ActivationGGN", "ActivationHessian", "ActivationOperator", "TokenBlocks"]
