"""A study on several ranks: one shared folder, and pieces that run in parallel."""
