"""The figures of a diagnosis."""
from __future__ import annotations
def draw(found):
    return {}
