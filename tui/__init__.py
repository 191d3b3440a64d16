"""The Textual chat: what is on the screen, and the thread that the session lives in.

`app.ChatApp` puts the parts together. The conversation itself is plain data (`conversation`), the
session is spoken to by messages only (`worker`, `messages`), and nothing here touches an array.
"""
