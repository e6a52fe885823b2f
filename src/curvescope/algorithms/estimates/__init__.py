"""Numbers from random probes, each with an interval that covers it: traces, diagonals, norms."""
