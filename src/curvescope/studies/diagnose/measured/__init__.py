"""What is measured of a model, before anything is said about it."""
