"""Train an EAGLE-3 drafter for a model on this machine, from the model's own answers."""
