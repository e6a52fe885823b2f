"""The numbers of a measurement: their names, and what each is."""

from __future__ import annotations

COLUMNS = {
    "step": "step of the training loop",
    "seconds": "since the start, of all processes that worked on the run",
    "cost_seconds": "that this measurement took",
    "share": "of the time so far that was spent measuring",
    "products": "with one vector that this measurement took, of the Hessian, of its blocks and of the GGN",
    "loss": "L on the probe batches, in eval mode",
    "grad_norm": "‖∇L‖ there",
    "weight_norm": "norm of the parameters that are measured",
    "lambda_max": "largest eigenvalue of the Hessian",
    "lambda_max_error": "up to a bound of all eigenvalues that holds with probability 99 %",
    "lambda_min": "smallest eigenvalue",
    "lambda_min_error": "its residual, and not less than the tolerance times λ_max",
    "converged": "whether both errors are within the tolerance",
    "verified": "whether a search from a random vector found nothing beyond; nan where none was due",
    "trace": "of the Hessian",
    "trace_stderr": "its standard error over probes",
    "trace_low": "low end of Student's 95 % interval, num_probes − 1 degrees of freedom",
    "trace_high": "its high end",
    "num_probes": "probes of the traces and of the gap, drawn anew at every step",
    "ggn_lambda_max": "largest eigenvalue of the GGN",
    "ggn_lambda_max_error": "likewise",
    "ggn_gap": "‖H − H_o‖_F / ‖H‖_F, from the probes of the trace",
    "ggn_gap_stderr": "its standard error over probes",
    "ggn_gap_low": "low end of its 95 % interval: Student's of the logarithm, widened for few probes",
    "ggn_gap_high": "its high end",
    "update_norm": "‖d‖ of the last step d of the optimizer, θ_t − θ_(t−1)",
    "curvature_along_update": "dᵀ H d / ‖d‖², at the weights after it",
    "lr": "η: the largest among the parameters that are measured",
    "lr_lambda_max": "η λ_max",
    "threshold": "above which η λ_max is unstable: 2, or that of SGD's momentum; nan for others",
    "sharpness": "λ_max of P^(−½) (H + weight decay) P^(−½), P the optimizer's own diagonal",
    "sharpness_error": "likewise",
    "lr_sharpness": "η times it",
    "sharpness_threshold": "above which that is unstable",
    "preconditioner_formed": "1 − β₂ᵗ of the optimizer's mean of squared gradients; 1 without one",
    "attention_entropy": "mean over layers, heads and queries of entropy / log(visible keys), 0 to 1",
    "attention_entropy_min": "the same of the head that has the lowest",
    "attention_logit_max": "largest |q·k| / √d among the pairs that see each other",
    "logit_max": "largest absolute output of the model",
    "train_loss": "the last training loss that `step` was given",
    "grad_share": "of ‖∇L‖² in the span of the top eigenvectors",
    "eigenspace_error": "sine to the true span: ‖R‖_F / gap, if none near was missed; 1: unknown",
    "curvature_along_gradient": "gᵀ H g / ‖g‖²",
    "overlap": "‖V Wᵀ‖_F² / k of the top eigenvectors with those of the last measurement, 0 to 1",
    "memory_over_training": "bytes by which the peak of the process, or of its GPU, grew in this measurement",
    "skipped": "measurements that were due since the last one and not made, to keep the budget",
    "uniform_loss": "log V: the cross-entropy of equal probabilities; nan for another loss",
    "moment_resolution": "(1 − β₂) over the rounding unit of second moments; below 1 they cannot decay",
}
"""Of the history, a row for each measurement; what was not measured is nan."""

BLOCK_COLUMNS = {
    "step": "step of the training loop",
    "block": "name",
    "lambda_max": "largest eigenvalue of the block of the Hessian; nan where it was not its turn",
    "lambda_max_error": "up to a bound of all its eigenvalues that holds with probability 99 %",
    "converged": "whether that is within the tolerance",
    "lambda_max_share": "of the squared entries of the top eigenvector of the whole Hessian",
    "sharpness_share": "of those of the top eigenvector that the optimizer sees",
    "weight_norm": "norm of the block's weights",
    "trace": "of the block",
    "trace_stderr": "its standard error over probes",
    "trace_low": "low end of Student's 95 % interval, num_probes − 1 degrees of freedom",
    "trace_high": "its high end",
}
"""Of the blocks, a row for each block at each measurement that has something to say of it."""

TEXT = "left_out"
"""The last column of the history: parts that the budget did not allow, in words."""
