"""nanoGPT: its checkpoints, rebuilt as zoo models, and its live modules."""
