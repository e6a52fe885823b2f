"""Operators over several processes: the ranks of `torch.distributed`, started for instance by `torchrun`."""

from curvescope.distributed import cost
from curvescope.distributed.data_parallel import DataParallel, value_and_gradient
from curvescope.distributed.division import divided, numbered, share
from curvescope.distributed.sharding import shard

__all__ = ["DataParallel", "cost", "divided", "numbered", "shard", "share", "value_and_gradient"]
