"""From tokens to the text of an answer: detokenized, cut at stop sequences, thinking apart."""
