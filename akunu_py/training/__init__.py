"""Train an EAGLE-3 drafter for a model on this machine, from the model's own answers.

`synthesis.py` lets the model write prompts and answers, `dataset.py` keeps them with their hidden
states, `design.py` decides on the drafter, `trainer.py` trains it, and `session.py` does all of it
within a time limit.
"""
