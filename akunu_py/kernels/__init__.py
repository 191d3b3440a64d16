"""Metal kernels of akunu, probed before use."""
