"""Data: re-readable batches that count their terms; tasks, text, images."""
