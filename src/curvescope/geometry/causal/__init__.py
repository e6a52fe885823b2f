"""Directions at named points: decode them, steer along them, ablate them, and attribute logits to parts."""
