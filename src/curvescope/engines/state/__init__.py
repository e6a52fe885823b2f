"""What a product depends on, in a few numbers and words: numbers in tensors, code, attributes."""
