"""Glossary of the words and symbols in tables and figures, one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Term(NamedTuple):
    """A word with its meaning; it stands in a text that has one of its `marks`."""

    name: str
    meaning: str
    marks: tuple[str, ...] = ()  # by default the name


TERMS = (
    Term(
        "H",
        "the Hessian: the matrix of second derivatives of the mean loss in the parameters; H = H_o + H_f.",
        ("Hessian", "H"),
    ),
    Term(
        "GGN, H_o",
        "the generalized Gauss–Newton matrix Jᵀ (∂²ℓ) J: the Hessian of the model linearized in its "
        "parameters. It has no negative eigenvalue if the loss is convex in the outputs.",
        ("GGN", "H_o"),
    ),
    Term(
        "functional Hessian, H_f",
        "the rest of the Hessian, Σ (∂ℓ/∂f) ∂²f: second derivatives of the model's outputs f, weighted by"
        " the derivative of the loss in them; H = H_o + H_f.",
        ("functional", "H_f"),
    ),
    Term(
        "term",
        "one summand of the loss, which is the mean over terms: for a language model one target token.",
        ("term", "terms"),
    ),
    Term(
        "block",
        "the parameters with one role, such as L3.W_Q (queries of layer 3); also the entries of a matrix "
        "between two roles. E is the embedding, P positions, U the unembedding, W_1 and W_2 the feed-"
        "forward layer; ln1, ln2 and ln_f are norms.",
        ("block", "blocks", "Block"),
    ),
    Term(
        "L3.h1",
        "head 1 of layer 3, both counted from 0. With grouped heads, W_K and W_V belong to KV head 1.",
        ("head", "heads"),
    ),
    Term(
        "λ_max, λ_min",
        "the largest and the smallest eigenvalue, with sign.",
        ("λ_max", "λ_min", "extreme"),
    ),
    Term(
        "residual",
        "‖A v − λ v‖ for a unit vector v: an eigenvalue of A lies within this distance of λ.",
        ("residual", "residuals"),
    ),
    Term(
        "learning-rate ceiling",
        "2/λ_max: with a larger learning rate, plain gradient descent moves away from a minimum along the"
        " sharpest direction. Adam and momentum have other thresholds.",
        ("ceiling", "2/λ_max"),
    ),
    Term(
        "density",
        "the share of eigenvalues near λ, from stochastic Lanczos quadrature, smoothed by a kernel of the"
        " stated width.",
        ("density", "densities", "Density"),
    ),
    Term(
        "probe",
        "a random vector. Traces and norms are means over probes, and their spread gives the error. "
        "Shared probes serve all blocks at once; separate ones are drawn for a single small block.",
        ("probe", "probes"),
    ),
    Term(
        "±",
        "one standard error: of a headline over probes and over other data of this kind and size "
        "together, of other numbers over probes; an interval is meant to hold the mean over such samples "
        "in 95 of 100 (docs/uncertainty.md).",
        ("±", "stderr", "standard error"),
    ),
    Term(
        "exact",
        "computed entry by entry, without probes: the only error is rounding.",
        ("exact",),
    ),
    Term(
        "below noise",
        "the estimate cannot be distinguished from zero; the value is less than the number shown.",
        ("below noise", "<"),
    ),
    Term(
        "‖A‖_F",
        "the Frobenius norm: the square root of the sum of squared entries.",
        ("‖_F", "Frobenius"),
    ),
    Term(
        "rms",
        "the root mean square of a block's entries: the Frobenius norm divided by the square root of "
        "their number.",
        ("rms", "Root mean square", "root mean square"),
    ),
    Term(
        "brightness",
        "the mean of log10(|entry| + 1e-6) over a block: its color in a picture of all entries.",
    ),
    Term(
        "stripe",
        "entries of the query–key block at equal coordinates of queries and keys, where a term A ⊗ I "
        "lies. Its ratio compares them with the other entries; its share is the part of ‖H_QK‖² in the "
        "span of all A ⊗ I.",
    ),
    Term(
        "heterogeneity",
        "the difference between spectra of blocks: Jensen–Shannon divergence in bits, 0 for equal "
        "spectra, 1 for spectra without a common eigenvalue.",
        ("heterogeneity", "Jensen"),
    ),
    Term(
        "sharpest over median",
        "the largest λ_max of a block divided by that of the median block.",
    ),
    Term(
        "source",
        "a norm, attention or feed-forward network. Its own second derivative, together with the first "
        "derivatives of all others, adds a part to the Hessian: H = H_o + Σ over sources.",
        ("source", "sources"),
    ),
    Term(
        "rest",
        "the Hessian minus the GGN and all other sources: second derivatives of operations outside norms,"
        " attentions and feed-forward networks. This is the head, because logits are bilinear in the last"
        " state and the unembedding.",
        ("Rest:",),
    ),
    Term(
        "share",
        "⟨A, H⟩ / ‖H‖² for a source A, with ⟨·,·⟩ the sum over products of entries. The shares of the GGN"
        " and all sources add up to 1; a negative share cancels part of the others.",
        ("share of ‖H‖²", "share of the GGN"),
    ),
    Term(
        "coupling",
        "‖H_lm‖ / √(‖H_ll‖ ‖H_mm‖) for two layers l and m: 1 on the diagonal, 0 if the gradient of one "
        "layer does not depend on the other.",
        ("coupling", "coupled"),
    ),
    Term(
        "power law, exponent",
        "q ∝ xᵅ: a straight line of slope α in logarithms. It is supported if it differs from a constant,"
        " is not curved, does not depend on the other variables, and the points lie near it; the caption "
        "has the tests.",
        ("power law", "power laws"),
    ),
    Term(
        "effective rank, of the GGN",
        "(tr)²/‖·‖_F²: the number of equal eigenvalues that would give its trace and norm. The effective "
        "rank of a head is defined differently.",
        ("effective_rank", "tr²/‖GGN‖_F²"),
    ),
    Term(
        "spread",
        "n λ_max/tr: λ_max divided by the mean eigenvalue of the GGN. The condition number is at least "
        "this large.",
        ("n λ_max/tr",),
    ),
    Term(
        "gap",
        "‖H − H_o‖_F/‖H‖_F: the part of the Hessian that the GGN lacks.",
        ("‖H − H_o‖_F",),
    ),
    Term(
        "functional share",
        "‖H_f‖_F/‖H‖_F: the functional Hessian relative to the Hessian. It can exceed 1 if GGN and "
        "functional Hessian partly cancel.",
        ("functional share", "functional_share"),
    ),
    Term(
        "λ_max gap",
        "1 − λ_max(H_o)/λ_max(H): the part of the largest eigenvalue that the GGN lacks; negative if the "
        "GGN has too much.",
        ("λ_max gap", "lambda_max_gap"),
    ),
    Term(
        "W₁, Wasserstein distance",
        "∫ |F − G| with F and G the shares of eigenvalues up to x: the mean distance that eigenvalues "
        "move when one spectrum becomes the other, in units of the root mean square eigenvalue ‖H‖_F/√n.",
        ("W₁", "Wasserstein", "wasserstein"),
    ),
    Term(
        "ρ, rank correlation",
        "Spearman's rank correlation: 1 if one number always grows with the other, −1 if it always falls,"
        " 0 for neither.",
        ("Spearman", "rank correlation", "rank correlations", "spearman"),
    ),
    Term(
        "excess loss",
        "the held-out loss minus the smallest possible loss, that of the process that generated the data.",
        ("excess_loss", "L − L*"),
    ),
    Term(
        "bootstrap",
        "resampling the measured cells and seeds, with replacement, to see how much a fit varies.",
    ),
    Term(
        "slack",
        "a bound divided by the true norm: above 1 the bound holds, below 1 it is violated.",
        ("slack", "Slack"),
    ),
    Term(
        "a priori, measured",
        "an a-priori bound uses only norms of tokens, weights and targets; a measured one uses norms of "
        "the Jacobians, moments and residuals of a forward pass.",
        ("a priori", "corrected, measured"),
    ),
    Term(
        "certified",
        "a bound proved from the per-query matrices of one forward pass, with a margin for rounding.",
        ("certified", "Certified"),
    ),
    Term(
        "ξ, Φ",
        "second derivatives before a loss: ξ_ij of a block's last sum S in the weights i and j, Φ_ij of "
        "an attention head's output.",
        ("ξ_21", "Φ_VQ"),
    ),
    Term(
        "bulk, outliers, of scalar attention",
        "the bulk are the repeated eigenvalues ±b; outliers are all others, or the three largest of each "
        "sign.",
        ("±b", "bulk |b|"),
    ),
    Term(
        "pairing, P",
        "1 − Σ|p − n| / Σ(p + n) over positive eigenvalues p and absolute values n of negative ones, both"
        " in descending order: 1 for a symmetric spectrum, 0 if all have one sign.",
        ("pairing", "Pairing"),
    ),
    Term(
        "condition number",
        "max |λ| / min |λ| over the nonzero eigenvalues.",
        ("condition number", "Condition number", "condition"),
    ),
    Term(
        "QK, VO",
        "a head's two circuits: W_QK = W_Q W_Kᵀ says what a query looks for, W_VO = W_V W_O what the head"
        " writes from there.",
        ("QK", "VO", "qk", "vo"),
    ),
    Term(
        "s₁",
        "the largest singular value.",
    ),
    Term(
        "99 % QK, 99 % VO",
        "the number of singular values that hold 99 % of Σ s².",
        ("99 %",),
    ),
    Term(
        "effective rank, of a head",
        "exp of the entropy of s²/Σ s² over the singular values s: the number of singular directions that"
        " matter.",
        ("effective rank", "effective ranks"),
    ),
    Term(
        "copying",
        "Re Σλ / Σ|λ| over the eigenvalues of W_VO in token space: at 1 the head writes what it reads, at"
        " −1 the negative.",
        ("copying", "copies"),
    ),
    Term(
        "k₀",
        "the part of a key's score that is the same for every query; it comes from the query's bias.",
    ),
    Term(
        "composition",
        "how strongly a later head reads what an earlier one writes. Chance is the value for random "
        "directions with the same singular values.",
    ),
    Term(
        "folded",
        "a norm's γ and β are multiplied into the weights that follow it.",
        ("folded", "γ"),
    ),
    Term(
        "logit lens",
        "an inner state decoded by the model's own last norm and unembedding.",
        ("lens",),
    ),
    Term(
        "L3.mid, L3.out",
        "states of a token: after the attention of layer 3 and before its feed-forward part, and at the "
        "end of the layer.",
        (".mid", ".out"),
    ),
    Term(
        "step, turn",
        "a step is the angle between the states before and after one part of a layer (attention or feed-"
        "forward). A turn is the angle between two successive steps: 0° goes straight on, 180° goes back.",
        ("turn",),
    ),
    Term(
        "KL",
        "Kullback–Leibler divergence, in nats.",
        ("KL",),
    ),
    Term(
        "σ",
        "the scale of the embeddings in the sweeps of ormaniec2025.",
        ("σ",),
    ),
    Term(
        "w*",
        "the given weights, around which points are drawn.",
        ("w*",),
    ),
    Term(
        "L_k",
        "the mean loss of k samples (sequences); L_{k+1} − L_k is the change from one more sample.",
        ("L_k", "L_{k+1}"),
    ),
    Term(
        "control",
        "independent random numbers with the mean and variance of the losses, without a model.",
        ("control",),
    ),
    Term(
        "H_x, tr Cov g",
        "the Hessian of a single sample, and the trace of the covariance of single samples' gradients; H̄"
        " is the mean of the H_x.",
        ("H_x", "tr Cov"),
    ),
    Term(
        "Δ₂",
        "the mean square of L_{k+1} − L_k over Gaussian points of a subspace, in the quadratic model.",
        ("Δ₂",),
    ),
    Term(
        "attention sink, sink mass",
        "a token, mostly the first one, that takes attention weight without being relevant. Its mass is "
        "the share of the attention weights it takes, averaged over heads and later queries.",
        ("sink", "sinks"),
    ),
    Term(
        "massive activation",
        "an entry of the residual stream that is far larger than the others of its token: largest over "
        "median |x|.",
        ("massive", "Massive"),
    ),
    Term(
        "bulk, outliers",
        "the bulk are the many eigenvalues near zero, outliers the few far from it. Counts weigh each "
        "eigenvalue beyond a threshold τ softly, by x⁴/(1 + x⁴) with x = λ/τ. The width of the bulk is "
        "the root mean square of the rest, and stretch is λ_max divided by it.",
        ("bulk width", "bulk_width", "width of the bulk"),
    ),
    Term(
        "softmax one",
        "a softmax with a constant added to its denominator, so that a head can attend to nothing.",
        ("softmax_one", "softmax one"),
    ),
)


def used_in(texts: Iterable[str]) -> list[Term]:
    """The terms that stand in any of the texts, in the order of the glossary."""
    whole = "\n".join(texts)
    return [term for term in TERMS if any(_stands(mark, whole) for mark in term.marks or (term.name,))]


def _stands(mark: str, text: str) -> bool:
    """Return True if a mark is a word of the text, or occurs anywhere if it begins or ends with a sign."""
    left, right = (r"(?<!\w)" if mark[0].isalnum() else "", r"(?!\w)" if mark[-1].isalnum() else "")
    return re.search(left + re.escape(mark) + right, text) is not None
