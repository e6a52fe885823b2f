"""Gemma: Llama's layout, a gain of 1 + g in every norm, and embeddings multiplied by √d_model."""

from dataclasses import replace

from curvescope.models.adapters.llama import FAMILY as LLAMA

NOTES = ("norms multiply by 1 + g, where g is the parameter", "embeddings are multiplied by √d_model")

FAMILY = replace(LLAMA, notes=NOTES)
