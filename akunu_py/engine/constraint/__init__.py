"""What an answer must match: masks for the target, and drafts of what is forced."""
