"""What the chat does, one controller a concern. Each owns its state; constructors say what it uses.

`app` makes them and passes them keys and messages; `view` is all that they draw on.
"""
