"""The Textual chat: `app.ChatApp` composes the main screen, the conversation and the controllers.

The model and the store run in threads of their own (`workers`); no array reaches this wing.
"""
