"""Structures of tensors: trees of them, and the autograd graph behind one."""
