"""Linear systems: conjugate gradients, minimal residuals, least squares, Neumann's series; inverses."""
