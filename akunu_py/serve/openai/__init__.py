"""Chat Completions and Completions, as OpenAI's clients speak them."""
