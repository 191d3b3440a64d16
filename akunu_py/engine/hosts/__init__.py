"""Tensor and pipeline parallelism over mx.distributed. Rank 0 coordinates, other ranks work."""
