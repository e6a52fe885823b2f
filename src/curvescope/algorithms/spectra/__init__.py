"""Eigenvalues by Lanczos: pairs at the ends, densities of all of them, and what is certain about both."""
