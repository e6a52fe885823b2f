"""Stability of training steps: the sharpness that an optimizer sees."""
