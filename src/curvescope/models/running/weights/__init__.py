"""Weights of a layer that are sharded over ranks, or stored in half precision."""
