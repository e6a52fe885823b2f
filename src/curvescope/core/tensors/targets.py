"""What a target may be besides a class."""

IGNORED = -100
"""A target that does not count, in sums and in the number of terms."""
