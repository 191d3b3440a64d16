"""The Textual chat. `app.ChatApp` composes the view, the conversation and the controllers.

The session and the store live in threads of their own, and are spoken to by messages and calls;
nothing here touches an array.
"""
