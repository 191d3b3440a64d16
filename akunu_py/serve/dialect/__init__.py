"""What all dialects share: the interface to HTTP, bodies, sampling parameters, the model."""
