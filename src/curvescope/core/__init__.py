"""Tensors and nothing else: operators, blocks, results, seeds, errors."""
