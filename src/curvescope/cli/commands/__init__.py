"""Signatures, options and examples of the commands; the modules in `cli/` do the work."""
