"""Running a module: patches under its lock, kernels inside, casts left out."""
