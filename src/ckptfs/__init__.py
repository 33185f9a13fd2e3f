"""ckptfs: a file system for training checkpoints.

Files are acknowledged at the speed of the local drive and, behind the acknowledgement, erasure-coded over
the drives of peer nodes. The rooms are `ckptfs.fs` (what people touch), `ckptfs.replication` (shards and peers)
and `ckptfs.cache` (a node's own state); imports go only in that order.
"""

__version__ = "0.1.0"
