"""Code shared by studies: statistics, training, weight changes, and plans of products."""
