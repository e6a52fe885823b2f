"""Run a module: patches under its lock, replacements by kernels, skipped casts."""
