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
    "lambda_max": "largest eigenvalue of the Hessian",
    "lambda_max_error": "min(r, r²/gap) of its residual r; a larger one may be missed unless it is verified",
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
    "lr": "η: the largest among the parameters that are measured",
    "lr_lambda_max": "η λ_max",
    "threshold": "above which η λ_max is unstable: 2, or that of SGD's momentum; nan for others",
    "sharpness": "λ_max of P^(−½) (H + weight decay) P^(−½), P the optimizer's own diagonal",
    "sharpness_error": "likewise",
    "lr_sharpness": "η times it",
    "sharpness_threshold": "above which that is unstable",
    "grad_share": "of ‖∇L‖² in the span of the top eigenvectors",
    "eigenspace_error": "sine to the true span: ‖R‖_F / gap, if none near was missed; 1: unknown",
    "curvature_along_gradient": "gᵀ H g / ‖g‖²",
    "overlap": "‖V Wᵀ‖_F² / k of the top eigenvectors with those of the last measurement, 0 to 1",
    "skipped": "measurements that were due since the last one and not made, to keep the budget",
}
"""Of the history, a row for each measurement; what was not measured is nan."""

BLOCK_COLUMNS = {
    "step": "step of the training loop",
    "block": "name",
    "lambda_max": "largest eigenvalue of the block of the Hessian; nan where it was not its turn",
    "lambda_max_error": "min(r, r²/gap) of its residual r; a larger one may be missed",
    "converged": "whether that is within the tolerance",
    "trace": "of the block",
    "trace_stderr": "its standard error over probes",
    "trace_low": "low end of Student's 95 % interval, num_probes − 1 degrees of freedom",
    "trace_high": "its high end",
}
"""Of the blocks, a row for each block at each measurement that has something to say of it."""

TEXT = "left_out"
"""The last column of the history: parts that the budget did not allow, in words."""
