"""Whole networks: maps with known derivatives, put together into blocks and stacks."""
