"""What the words and symbols of tables and figures mean, in a sentence each."""

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
    Term("H", "the Hessian: second derivatives of the mean loss in the parameters.", ("Hessian", "H")),
    Term(
        "GGN, H_o",
        "the generalized Gauss–Newton matrix Jᵀ (∂²ℓ) J: the Hessian of the model "
        "linearized in its parameters; it has no negative eigenvalue for a convex loss.",
        ("GGN", "H_o"),
    ),
    Term(
        "functional Hessian, H_f",
        "what the Hessian has beyond the GGN, Σ (∂ℓ/∂f) ∂²f: curvature of the model itself; H = H_o + H_f.",
        ("functional", "H_f"),
    ),
    Term(
        "block",
        "the parameters with one role, such as L3.W_Q (queries of layer 3), or a matrix's entries between "
        "two of them. E is the embedding, P positions, U the unembedding, W_1 and W_2 the feed-forward "
        "layer, ln1, ln2 and ln_f are norms.",
        ("block", "blocks", "Block"),
    ),
    Term(
        "L3.h1",
        "head 1 of layer 3, both counted from 0. Of grouped heads, W_K and W_V are those of KV head 1.",
        ("head", "heads"),
    ),
    Term("λ_max, λ_min", "the largest and the least eigenvalue, with sign.", ("λ_max", "λ_min", "extreme")),
    Term(
        "residual",
        "‖A v − λ v‖ of a unit vector v: an eigenvalue of A lies within this distance of λ.",
        ("residual", "residuals"),
    ),
    Term(
        "learning-rate ceiling",
        "2/λ_max: plain gradient descent with a larger step moves away from a minimum along the sharpest "
        "direction. Adam and momentum have other thresholds.",
        ("ceiling", "2/λ_max"),
    ),
    Term(
        "density",
        "the share of eigenvalues near λ, by stochastic Lanczos quadrature, broadened by a kernel of "
        "stated width.",
        ("density", "densities", "Density"),
    ),
    Term(
        "probe",
        "a random vector; traces and norms are means over probes, and their spread gives the error. Shared "
        "probes serve all blocks at once; own ones are drawn for a single, small block.",
        ("probe", "probes"),
    ),
    Term(
        "±",
        "one standard error over probes, unless said otherwise; an interval is meant to hold the true value "
        "in 95 of 100 runs (how often it does was measured: docs/conventions.md).",
        ("±", "stderr", "standard error"),
    ),
    Term("exact", "computed entry by entry, without probes: its error is rounding.", ("exact",)),
    Term(
        "below noise",
        "the estimate cannot be told from zero: it is less than the number shown.",
        ("below noise", "<"),
    ),
    Term("‖A‖_F", "the Frobenius norm: the root of the sum of squared entries.", ("‖_F", "Frobenius")),
    Term(
        "rms",
        "the root mean square of a block's entries: its Frobenius norm free of its size.",
        ("rms", "Root mean square", "root mean square"),
    ),
    Term(
        "brightness",
        "the mean of log10(|entry| + 1e-6) over a block: its color in a picture of all entries.",
    ),
    Term(
        "stripe",
        "entries of the query–key block at equal coordinates of queries and keys, where a term A ⊗ I lies; "
        "its ratio compares them with the rest, its share is that of ‖H_QK‖² in the span of all A ⊗ I.",
    ),
    Term(
        "heterogeneity",
        "how different the spectra of blocks are: Jensen–Shannon divergence in bits, 0 for equal ones, 1 for "
        "ones that share no eigenvalue.",
        ("heterogeneity", "Jensen"),
    ),
    Term(
        "sharpest over median",
        "the largest λ_max of a block over that of the median block: so many times flatter is the latter.",
    ),
    Term(
        "source",
        "a norm, attention or feed-forward network whose own second derivative, seen through the first "
        "derivatives of all others, adds a part to the Hessian: H = H_o + Σ over sources.",
        ("source", "sources"),
    ),
    Term(
        "rest",
        "as a source: what is left of the Hessian when the GGN and all other sources are taken away, the "
        "second derivatives of what is called outside of norms, attentions and feed-forward networks. It is "
        "the head, logits being bilinear in the last state and the unembedding.",
        ("Rest:",),
    ),
    Term(
        "share",
        "⟨A, H⟩ / ‖H‖² of a source A, with ⟨·,·⟩ the sum over products of entries: shares of the GGN and all "
        "sources add up to 1, and one below zero takes away what others bring.",
        ("share of ‖H‖²", "share of the GGN"),
    ),
    Term(
        "coupling",
        "‖H_lm‖ / √(‖H_ll‖ ‖H_mm‖) of two layers l and m: 1 on the diagonal, 0 where neither bends the "
        "other.",
        ("coupling", "coupled"),
    ),
    Term(
        "power law, exponent",
        "q ∝ xᵅ: a straight line of slope α over logarithms. It is supported if it can be told from a "
        "constant, is not bent, does not depend on what else is varied, and the points lie near it; the "
        "tests are in the caption.",
        ("power law", "power laws"),
    ),
    Term(
        "effective rank, of the GGN",
        "(tr)²/‖·‖_F²: so many equal eigenvalues would have its trace and norm. That of a head is another.",
        ("effective_rank", "tr²/‖GGN‖_F²"),
    ),
    Term(
        "spread",
        "λ_max over the mean eigenvalue of the GGN, n λ_max/tr: its condition number is at least that large.",
        ("n λ_max/tr",),
    ),
    Term(
        "gap",
        "‖H − H_o‖_F/‖H‖_F: how much of the Hessian the GGN misses.",
        ("‖H − H_o‖_F",),
    ),
    Term(
        "functional share",
        "‖H_f‖_F/‖H‖_F: the functional Hessian beside the whole Hessian. It may exceed 1, where GGN and "
        "functional Hessian take away from each other.",
        ("functional share", "functional_share"),
    ),
    Term(
        "λ_max gap",
        "1 − λ_max(H_o)/λ_max(H): what the GGN misses of the largest eigenvalue; below zero it has too much.",
        ("λ_max gap", "lambda_max_gap"),
    ),
    Term(
        "W₁, Wasserstein distance",
        "∫ |F − G| over the shares of eigenvalues up to x: the mean way that eigenvalues go when one "
        "spectrum is turned into another; here in units of the root mean square eigenvalue ‖H‖_F/√n.",
        ("W₁", "Wasserstein", "wasserstein"),
    ),
    Term(
        "ρ, rank correlation",
        "Spearman's: 1 where one number always grows with another, −1 where it always falls, 0 for neither.",
        ("Spearman", "rank correlation", "rank correlations", "spearman"),
    ),
    Term(
        "excess loss",
        "the held-out loss above the least possible one, that of the language that the data are from.",
        ("excess_loss", "L − L*"),
    ),
    Term(
        "bootstrap",
        "drawing again from the measured cells and seeds, with replacement, to see how far a fit moves.",
    ),
    Term(
        "slack",
        "a bound divided by the true norm: above 1 it holds, below 1 it is violated.",
        ("slack", "Slack"),
    ),
    Term(
        "a priori, measured",
        "a bound from norms of tokens, weights and targets alone; one from norms of the Jacobians, moments "
        "and residuals of a forward pass.",
        ("a priori", "corrected, measured"),
    ),
    Term(
        "certified",
        "a bound proved from the per-query matrices of one forward pass, with room for rounding.",
        ("certified", "Certified"),
    ),
    Term(
        "ξ, Φ",
        "second derivatives before a loss: ξ_ij of a block's last sum S in the weights i and j, Φ_ij of an "
        "attention head's output.",
        ("ξ_21", "Φ_VQ"),
    ),
    Term(
        "bulk, outliers, of scalar attention",
        "the bulk are the eigenvalues ±b, which are repeated; outliers are the rest, or the three largest of "
        "each sign.",
        ("±b", "bulk |b|"),
    ),
    Term(
        "pairing, P",
        "1 − Σ|p − n| / Σ(p + n) over positive eigenvalues p and sizes n of negative ones, both descending: "
        "1 for a symmetric spectrum, 0 for one of one sign.",
        ("pairing", "Pairing"),
    ),
    Term(
        "condition number",
        "max |λ| / min |λ| over the eigenvalues that are not zero.",
        ("condition number", "Condition number", "condition"),
    ),
    Term(
        "QK, VO",
        "a head's two circuits: W_QK = W_Q W_Kᵀ says what a query looks for, W_VO = W_V W_O what is written "
        "where it looks.",
        ("QK", "VO", "qk", "vo"),
    ),
    Term("s₁", "the largest singular value."),
    Term("99 % QK, 99 % VO", "how many singular values hold 99 % of Σ s².", ("99 %",)),
    Term(
        "effective rank, of a head",
        "exp of the entropy of s²/Σ s² over the singular values s: how many singular directions count.",
        ("effective rank", "effective ranks"),
    ),
    Term(
        "copying",
        "Re Σλ / Σ|λ| over the eigenvalues of W_VO in token space: 1 copies what it reads, −1 negates it.",
        ("copying", "copies"),
    ),
    Term("k₀", "the part of a key's score that is the same for every query, from the query's bias."),
    Term(
        "composition",
        "how strongly a later head reads what an earlier one writes; chance is that of random directions "
        "with the same singular values.",
    ),
    Term("folded", "a norm's γ and β taken into the weights behind it.", ("folded", "γ")),
    Term("logit lens", "an inner state read by the model's own last norm and unembedding.", ("lens",)),
    Term(
        "L3.mid, L3.out",
        "the state of a token inside layer 3, with what attention added and without what the feed-forward "
        "part adds, and the state at its end.",
        (".mid", ".out"),
    ),
    Term(
        "step, turn",
        "a step is the angle between the states before and after one part of a layer, attention or "
        "feed-forward; a turn is the angle between two steps that follow each other: 0° goes straight on, "
        "180° goes back.",
        ("turn",),
    ),
    Term("KL", "Kullback–Leibler divergence, in nats.", ("KL",)),
    Term("σ", "the scale of the embeddings, in the sweeps of ormaniec2025.", ("σ",)),
    Term("w*", "the weights as they are, around which points are drawn.", ("w*",)),
    Term(
        "L_k",
        "the mean loss of k samples, which are sequences; L_{k+1} − L_k is what one more of them changes.",
        ("L_k", "L_{k+1}"),
    ),
    Term(
        "control",
        "independent random numbers with the mean and variance of the losses: what no model made.",
        ("control",),
    ),
    Term(
        "H_x, tr Cov g",
        "the Hessian of a single sample, and the trace of the covariance of single samples' gradients; H̄ is "
        "the mean of the H_x.",
        ("H_x", "tr Cov"),
    ),
    Term(
        "Δ₂",
        "the mean square of L_{k+1} − L_k over Gaussian points of a subspace, of the quadratic model.",
        ("Δ₂",),
    ),
    Term(
        "attention sink, sink mass",
        "a token that heads look at when they look at nothing, mostly the first one; its mass is the share "
        "of the attention weights that it takes, the mean over heads and later queries.",
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
        "the bulk are the many eigenvalues near zero, outliers the few far from it. Where they are counted, "
        "outliers are those beyond a threshold τ, softly, by x⁴/(1 + x⁴) of x = λ/τ; the width of the bulk "
        "is the root mean square of the rest, stretch is λ_max over it.",
        ("bulk width", "bulk_width", "width of the bulk"),
    ),
    Term(
        "softmax one",
        "a softmax with a constant added to its denominator, so that a head may look at nothing.",
        ("softmax_one", "softmax one"),
    ),
)


def used_in(texts: Iterable[str]) -> list[Term]:
    """The terms that stand in any of the texts, in the order of the glossary."""
    whole = "\n".join(texts)
    return [term for term in TERMS if any(_stands(mark, whole) for mark in term.marks or (term.name,))]


def _stands(mark: str, text: str) -> bool:
    """Whether a mark stands in a text as a word; one that begins or ends with a sign stands anywhere."""
    left, right = (r"(?<!\w)" if mark[0].isalnum() else "", r"(?!\w)" if mark[-1].isalnum() else "")
    return re.search(left + re.escape(mark) + right, text) is not None
