"""A loaded model: its arrays, its tokenizer side, and the models that draft for it."""
