"""Beyond one device: operators over several processes, which `torchrun` starts."""

from curvescope.distributed.sharding import shard

__all__ = ["shard"]
