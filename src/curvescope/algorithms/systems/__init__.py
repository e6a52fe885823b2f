"""Linear systems: conjugate gradients and minimal residuals."""
