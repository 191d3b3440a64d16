"""Heads for multi-token prediction (MTP) that checkpoints carry and mlx-lm drops."""
