"""Eigenvalues by Lanczos: extreme eigenpairs, spectral densities, and bounds for both."""
