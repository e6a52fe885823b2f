"""The captions of the study `causal`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from curvescope.studies.causal.study import Causal


def captions(result: Causal) -> dict[str, str]:
    """What each figure and table shows."""
    steps = ", ".join(f"{a:g}" for a in result.alphas)
    return {
        "predicted": "Change of the loss when the activations of all tokens are moved along a direction by "
        f"α = {steps} standard deviations of what is there, against its prediction: the gradient alone "
        "(left), and with the Hessian in these activations (middle). On the dashed line they agree. Right: "
        "median over directions of the error of both, as a share of the change found.",
        "logits": "Mean change of the logits of the tokens that a direction is decoded into, less the mean "
        "over the vocabulary, against the direct path from there to the unembedding with the last norm's "
        "scale held fixed: what lies off the dashed line is what other layers make of the step.",
        "attribution": "What every head, every feed-forward network and every bias adds to the logit of the "
        "right token, less the mean logit, in the mean over tokens, with standard errors over sequences. The "
        f"parts add up to the logit, {result.parts.logit:.2f}.",
        "directions": "One row for each direction and intervention. A step is α σ along the direction, σ the "
        "standard deviation of the activations there; an ablation takes the whole part along it out. first "
        "and second order: the predicted change of the loss. KL: of the outputs, in nats per token. tokens: "
        "those that the direction raises on the direct path; their logits' mean change, found and direct.",
    }
