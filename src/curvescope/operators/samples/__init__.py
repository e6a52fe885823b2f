"""Curvature of single sequences and terms of a problem."""
