"""How a conversation is written for a model: its chat template, and what templates differ in."""
