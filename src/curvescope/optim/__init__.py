"""Optimizers that use curvature, with the interface of torch.optim.

`opt.step(closure)`, where the closure returns the loss with its graph, without backward.
"""

from curvescope.optim.base import CurvatureOptimizer
from curvescope.optim.block_sgd import BlockSGD
from curvescope.optim.clipped_newton import ClippedNewton
from curvescope.optim.hutchinson_adam import HutchinsonAdam
from curvescope.optim.kfac_descent import KFACDescent
from curvescope.optim.newton_cg import NewtonCG
from curvescope.optim.sharpness_gd import SharpnessGD

__all__ = [
    "BlockSGD",
    "ClippedNewton",
    "CurvatureOptimizer",
    "HutchinsonAdam",
    "KFACDescent",
    "NewtonCG",
    "SharpnessGD",
]
