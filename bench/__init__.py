"""Speed, measured so that it can be believed."""
