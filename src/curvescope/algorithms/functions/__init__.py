"""Traces of functions of a symmetric operator, by stochastic Lanczos quadrature."""
