"""One controller per concern of the chat, each with its own state."""
