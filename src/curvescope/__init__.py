"""curvescope: a microscope for the curvature and geometry of Transformers.

Names are imported when first used, so that `import curvescope` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_MODULE_OF = {
    "load": "models.load",
    "Model": "models.model",
    "Transformer": "models.zoo.transformer",
    "TransformerConfig": "models.zoo.transformer",
    "MLP": "models.zoo.mlp",
    "MLPConfig": "models.zoo.mlp",
    "save": "models.zoo.folder",
    "Batch": "data.batches",
    "Batches": "data.batches",
    "text_data": "data.text",
    "masked_lm_data": "data.masking",
    "classification_data": "data.labels",
    "image_data": "data.labels",
    "denoising_data": "data.denoising",
    "task_data": "data.tasks",
    "CrossEntropy": "losses",
    "SquaredError": "losses",
    "CustomLoss": "losses",
    "Loss": "losses",
    "Problem": "problem",
    "CurvatureMonitor": "monitor",
    "lightning_callback": "monitor",
    "trainer_callback": "monitor",
    "ActivationGGN": "operators",
    "ActivationHessian": "operators",
    "Hessian": "operators",
    "GGN": "operators",
    "FunctionalHessian": "operators",
    "EmpiricalFisher": "operators",
    "MonteCarloFisher": "operators",
    "Jacobian": "operators",
    "KFAC": "operators",
    "EKFAC": "operators",
    "Shampoo": "operators",
    "kfac_quality": "operators",
    "FunctionalSource": "operators",
    "FunctionalSources": "operators",
    "loss_line": "operators",
    "loss_plane": "operators",
    "third_derivative": "operators",
    "per_sample": "operators",
    "exact_diagonal": "operators",
    "diagonal_cost": "operators",
    "LinearOperator": "core.operator",
    "Diagonal": "core.operator",
    "Identity": "core.operator",
    "LowRank": "core.operator",
    "Matrix": "core.operator",
    "as_operator": "core.operator.interchange",
    "eigsh": "algorithms",
    "spectral_density": "algorithms",
    "block_density": "algorithms",
    "block_norms": "algorithms",
    "trace": "algorithms",
    "block_traces": "algorithms",
    "diagonal": "algorithms",
    "frobenius_norm": "algorithms",
    "spectral_norm": "algorithms",
    "solve": "algorithms",
    "inverse": "algorithms",
    "deflate": "algorithms",
    "trace_function": "algorithms",
    "logdet": "algorithms",
    "preconditioned_sharpness": "algorithms",
    "sample_size": "sampling",
    "sampling_error": "sampling",
    "sdpa": "nn.functional",
    "twice_differentiable": "nn.dropin",
    "make_twice_differentiable": "nn.dropin",
    "CurvescopeError": "core.errors",
    "UsageError": "core.errors",
}
_PACKAGES = (
    "algorithms",
    "closed_form",
    "core",
    "data",
    "distributed",
    "geometry",
    "kernels",
    "losses",
    "models",
    "monitor",
    "nn",
    "operators",
    "optim",
    "papers",
    "sampling",
    "studies",
    "viz",
)

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "MLP",
    "ActivationGGN",
    "ActivationHessian",
    "Batch",
    "Batches",
    "CrossEntropy",
    "CurvatureMonitor",
    "CurvescopeError",
    "CustomLoss",
    "Diagonal",
    "EmpiricalFisher",
    "FunctionalHessian",
    "FunctionalSource",
    "FunctionalSources",
    "Hessian",
    "Identity",
    "Jacobian",
    "LinearOperator",
    "Loss",
    "LowRank",
    "MLPConfig",
    "Matrix",
    "Model",
    "MonteCarloFisher",
    "Problem",
    "Shampoo",
    "SquaredError",
    "Transformer",
    "TransformerConfig",
    "UsageError",
    "__version__",
    "as_operator",
    "block_density",
    "block_norms",
    "block_traces",
    "classification_data",
    "deflate",
    "denoising_data",
    "diagonal",
    "diagonal_cost",
    "eigsh",
    "exact_diagonal",
    "frobenius_norm",
    "image_data",
    "inverse",
    "kfac_quality",
    "lightning_callback",
    "load",
    "logdet",
    "loss_line",
    "loss_plane",
    "make_twice_differentiable",
    "masked_lm_data",
    "per_sample",
    "preconditioned_sharpness",
    "sample_size",
    "sampling_error",
    "save",
    "sdpa",
    "solve",
    "spectral_density",
    "spectral_norm",
    "task_data",
    "text_data",
    "third_derivative",
    "trace",
    "trace_function",
    "trainer_callback",
    "twice_differentiable",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"curvescope.{_MODULE_OF[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"curvescope.{name}")
    raise AttributeError(f"module 'curvescope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])


if TYPE_CHECKING:
    from curvescope.algorithms import (
        block_density,
        block_norms,
        block_traces,
        deflate,
        diagonal,
        eigsh,
        frobenius_norm,
        inverse,
        logdet,
        preconditioned_sharpness,
        solve,
        spectral_density,
        spectral_norm,
        trace,
        trace_function,
    )
    from curvescope.core.errors import CurvescopeError, UsageError
    from curvescope.core.operator import Diagonal, Identity, LinearOperator, LowRank, Matrix
    from curvescope.core.operator.interchange import as_operator
    from curvescope.data.batches import Batch, Batches
    from curvescope.data.denoising import denoising_data
    from curvescope.data.labels import classification_data, image_data
    from curvescope.data.masking import masked_lm_data
    from curvescope.data.tasks import task_data
    from curvescope.data.text import text_data
    from curvescope.losses import CrossEntropy, CustomLoss, Loss, SquaredError
    from curvescope.models.load import load
    from curvescope.models.model import Model
    from curvescope.models.zoo.folder import save
    from curvescope.models.zoo.mlp import MLP, MLPConfig
    from curvescope.models.zoo.transformer import Transformer, TransformerConfig
    from curvescope.monitor import CurvatureMonitor, lightning_callback, trainer_callback
    from curvescope.nn.dropin import make_twice_differentiable, twice_differentiable
    from curvescope.nn.functional import sdpa
    from curvescope.operators import (
        EKFAC,
        GGN,
        KFAC,
        ActivationGGN,
        ActivationHessian,
        EmpiricalFisher,
        FunctionalHessian,
        FunctionalSource,
        FunctionalSources,
        Hessian,
        Jacobian,
        MonteCarloFisher,
        Shampoo,
        diagonal_cost,
        exact_diagonal,
        kfac_quality,
        loss_line,
        loss_plane,
        per_sample,
        third_derivative,
    )
    from curvescope.problem import Problem
    from curvescope.sampling import sample_size, sampling_error
