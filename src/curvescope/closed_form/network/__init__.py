"""Complete networks: maps with known derivatives, composed into blocks and stacks."""
