"""The API of akunu's own clients, which share a server's model instead of loading a copy."""
