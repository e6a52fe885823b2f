"""Names of the bundled models and their checkpoints. Imports no torch."""

BUNDLED = {"tiny-gpt": "GPT of 4 layers, 0.56 million parameters, trained on Python's standard library"}
REVISIONS = ("initial", "early", "middle", "final")
