"""What every study needs, written once: statistics, plots, training, and plans of products."""
