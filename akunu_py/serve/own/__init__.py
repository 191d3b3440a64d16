"""What our own clients ask of a server, and how they do: the chat and the completion helper, which
then need not load a second copy of the model."""
