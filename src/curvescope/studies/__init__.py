"""List of the studies, packages with a `Config` and `run(cfg) -> Shown`; imports none of them."""

from __future__ import annotations

from curvescope.core.config import Config
from curvescope.core.errors import UsageError, near_misses
from curvescope.runs.study import Study, load_study

STUDIES = {
    "spectrum": "spectral densities, extreme eigenvalues and block maps of the Hessian and its two parts",
    "blocks": "trace, norms, extreme eigenvalues and densities of every layer × role block, compared",
    "propagation": "where curvature comes from: the Hessian split into norms, attention and feed-forward",
    "gap": "how well the GGN approximates the Hessian: λ_max, trace, norm, density, by block and over "
    "training",
    "compare": "models, checkpoints or data sets side by side: differences of curvature, with intervals",
    "weight_norms": "λ_max against norms of weight matrices: rank correlations, over training, random models",
    "diagnose": "checks of a model for known problems: findings with numbers, errors and evidence",
    "sinks": "attention sinks: where they are, and how the spectrum changes under six interventions",
    "dynamics": "curvature during training: edge of stability, warm-up, spikes, grokking, checkpoints",
    "scaling": "loss and curvature over model size and data size: the power laws that a grid of runs "
    "supports",
    "bounds": "exact norms of Hessians next to published and corrected bounds, and where a bound fails",
    "exact_spectra": "spectra in closed form: bulk, outliers, their shifts, GGN against H, ±λ pairs",
    "full_hessian": "every entry of the Hessian of a one-block ViT, before and after training, over seeds",
    "prune": "pruning of weights and heads: loss predicted by magnitude, Fisher, OBD and OBS, and "
    "measured loss",
    "quantize": "quantization to 8, 4 and 3 bits, with GPTQ: loss predicted by curvature, and measured loss",
    "influence": "which training sequences changed a prediction: exact inverse products, checked by "
    "retraining",
    "hvp": "cost of a Hessian-vector product: time in gradients, memory and error, ours and other libraries",
    "attention": "cost of attention with second derivatives, compared with PyTorch's math path, by length",
    "activations": "curvature of the loss in the activations of every token, layer by layer, and its "
    "directions",
    "causal": "steering and ablation along directions of heads and layers: predicted and measured; "
    "logits by head",
    "optimizers": "curvature-based optimizers against SGD and AdamW, tuned equally: by step, work and time",
    "factors": "K-FAC and similar factorizations over training: distance from GGN and Hessian, quality "
    "of the step",
    "why_adam": "the gap between tuned SGD and Adam against heterogeneity of curvature, between and in "
    "blocks",
    "embeddings": "lengths and attainable logits of tokens; distance of the embedding from its "
    "normalized form",
    "probes": "nearest keys of words in every head, and what their values write",
    "heads": "QK and VO circuits of every head as tokens, their spectra, copying and composition",
    "trajectory": "paths of tokens through the layers: angles, logit lens, and which component moves them",
    "taylor": "range of quadratic and cubic predictions: lines, a plane, gradient descent, maximum step",
    "landscape": "how the mean loss converges as the sample grows: with a control, by exact laws, around w*",
    "layernorm": "the ellipsoids of a model's norms, and keys that no query can prefer",
}

RUNS = {**STUDIES, "monitor": "curvature of a model during training, measured by a monitor"}
"""Kinds of run folders: a study, or a training run with a monitor (`monitor/`)."""


def find(name: str) -> Study[Config]:
    """Import and return the study of that name."""
    if name not in STUDIES:
        raise UsageError(f"expected a study, got {name!r}", hint=near_misses(name, list(STUDIES)))
    return load_study(f"curvescope.studies.{name}")
