"""Chat templates: rendering of conversations, and the variables for reasoning effort."""
