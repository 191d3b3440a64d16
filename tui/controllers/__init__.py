"""What the chat does: one controller per concern, each with its own state.

`app` creates the controllers and passes them keys and messages; they draw on `screens.main`.
"""
