"""The HTTP side of the server: access, bodies, streaming, metrics, the process itself."""
