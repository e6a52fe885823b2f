"""Attention of PyTorch and of modules: which way it is computed."""
