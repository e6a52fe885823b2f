"""Formulas of papers as printed and as corrected: Kronecker forms, theorems and bounds."""
