"""The API of akunu's own clients, which then need not load a second copy of the model."""
