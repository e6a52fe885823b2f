"""Operators over several processes, the ranks of `torch.distributed`, as `torchrun` starts them."""

from curvescope.distributed import cost
from curvescope.distributed.data_parallel import DataParallel
from curvescope.distributed.division import divided
from curvescope.distributed.gradient import value_and_gradient
from curvescope.distributed.sharding import shard
from curvescope.distributed.shares import numbered, share

__all__ = ["DataParallel", "cost", "divided", "numbered", "shard", "share", "value_and_gradient"]
