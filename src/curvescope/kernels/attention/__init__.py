"""Softmax attention with two derivatives: in torch, in Triton, and for Hugging Face models."""

from curvescope.kernels.attention.function import attention

__all__ = ["attention"]
