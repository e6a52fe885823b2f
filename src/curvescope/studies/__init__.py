"""Studies: one folder per question, `Config` in, `run(cfg) -> Shown` out. This list imports none of them."""

from __future__ import annotations

from curvescope.core.config import Config
from curvescope.core.errors import UsageError, near_misses
from curvescope.runs.study import Study, study_in

STUDIES = {
    "spectrum": "spectral densities, extreme eigenvalues and block maps of the Hessian and its two parts",
    "blocks": "every layer × role block: trace, norms, extreme eigenvalues, densities, how they differ",
    "propagation": "where curvature comes from: the Hessian, split by norm, attention and feed-forward",
    "gap": "how well the GGN stands for the Hessian: λ_max, trace, norm, density, by block and over training",
    "compare": "models, checkpoints or data sets side by side: differences of curvature, with intervals",
    "weight_norms": "λ_max against norms of weight matrices: rank correlations, over training, random models",
    "diagnose": "what is wrong with a model, if anything: findings with numbers, errors and evidence",
    "sinks": "attention sinks: where they are, and how the spectrum moves as they grow, in six ways",
    "dynamics": "training as the monitor sees it: edge of stability, warm-up, spikes, grokking, checkpoints",
    "scaling": "loss and curvature over model size and data size: which power laws a trained grid supports",
    "bounds": "true norms of Hessians next to published and corrected bounds, and where a bound is none",
    "exact_spectra": "spectra in closed form: bulk, outliers, how they move, GGN against H, ±λ pairs",
    "full_hessian": "every entry of the Hessian of a one-block ViT, before and after training, over seeds",
    "prune": "weights and heads removed: what magnitude, Fisher, OBD and OBS predict, and what is measured",
    "quantize": "weights rounded to 8, 4 and 3 bits: what curvature predicts and what is measured, and GPTQ",
    "influence": "which training sequences moved a prediction: exact inverse products, against retraining",
    "hvp": "what a product costs: time in gradients, memory and error of our engines and other libraries",
    "attention": "what attention costs that has every derivative: beside PyTorch's plain path, by length",
    "activations": "how sharply the loss bends in the state of every token, layer by layer, and along what",
    "causal": "directions of heads and layers, steered and ablated: predicted against found; logits by head",
    "optimizers": "optimizers that use curvature beside SGD and AdamW, tuned alike: by step, work and time",
    "factors": "K-FAC and friends over training: how far from GGN and Hessian, and if that predicts the step",
    "why_adam": "the gap between tuned SGD and Adam beside heterogeneity of curvature, between and in blocks",
    "embeddings": "lengths and attainable logits of tokens, how near the embedding is to its normalized form",
    "probes": "nearest keys of words in every head, and what their values write",
    "heads": "QK and VO circuits of every head as tokens, their spectra, copying and composition",
    "trajectory": "paths of tokens through the layers: angles, logit lens, who moves them, and pictures",
    "taylor": "how far a quadratic and a cubic predict: lines, a plane, gradient descent and its ceiling",
    "landscape": "how the mean loss settles as the sample grows: beside a control, by exact laws, around w*",
    "layernorm": "the ellipsoids of a model's norms, and keys that no query can prefer",
}

RUNS = {**STUDIES, "monitor": "curvature of a model while it was trained, as a monitor saw it"}
"""What a run folder may be of: a study, or a training run that was watched (`monitor/`)."""


def find(name: str) -> Study[Config]:
    """The study of that name; its folder is imported now."""
    if name not in STUDIES:
        raise UsageError(f"expected a study, got {name!r}", hint=near_misses(name, list(STUDIES)))
    return study_in(f"curvescope.studies.{name}")
