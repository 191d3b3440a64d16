"""The engine for every other client on this machine, over HTTP on loopback."""
