"""Directions at named points: as tokens, ablated and steered along, and what the logits are made of."""
