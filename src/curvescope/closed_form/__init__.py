"""Exact formulas for the curvature of attention, norms, feed-forward layers and whole blocks.

Everything here is written out: nothing is differentiated by machine, and nothing knows the matrix-free
operators, so that each can be the other's oracle.
"""
