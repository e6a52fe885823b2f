"""Pieces of a section of the page: cards, findings, methods, pictures, tables."""
