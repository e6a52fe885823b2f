"""Names of the tasks with one-line descriptions, without imports, so that listing them is fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskName:
    """One-line description of a task, and its function `function` in `module`."""

    description: str
    module: str
    function: str


_PACKAGE = "curvescope.data.tasks"

TASKS: dict[str, TaskName] = {
    "addition": TaskName(
        "x + y = z digit by digit, 12 tokens; the answer counts (Ormaniec et al. 2025)",
        f"{_PACKAGE}.algorithmic",
        "addition",
    ),
    "modular_addition": TaskName(
        "a b = with the answer (a + b) mod p, all p² pairs or a fraction of them",
        f"{_PACKAGE}.algorithmic",
        "modular_addition",
    ),
    "copy": TaskName(
        "a random word, a separator, the word again; the second copy counts",
        f"{_PACKAGE}.algorithmic",
        "copy",
    ),
    "induction": TaskName(
        "… A B … A with the answer B: what followed the last letter before",
        f"{_PACKAGE}.algorithmic",
        "induction",
    ),
    "sorting": TaskName(
        "random letters, then the same letters sorted; the sorted part counts",
        f"{_PACKAGE}.algorithmic",
        "sorting",
    ),
    "markov": TaskName(
        "a Markov chain whose entropy rate, the least possible loss, is known",
        f"{_PACKAGE}.random_sequences",
        "markov",
    ),
    "gaussian_regression": TaskName(
        "Gaussian sequences X with real targets: a linear map of X, or pure noise",
        f"{_PACKAGE}.random_sequences",
        "gaussian_regression",
    ),
    "digits": TaskName(
        "8×8 images of handwritten digits, 10 classes (scikit-learn, no download)",
        f"{_PACKAGE}.pictures",
        "digits",
    ),
}
"""Every task by its name."""
