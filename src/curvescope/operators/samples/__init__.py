"""Single sequences and terms of a problem: their curvature, and whether they can be told apart."""
