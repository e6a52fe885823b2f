"""Data with something hidden or replaced, for models that restore it."""
