"""The commands: train.py and test.py, and `maml-rl` with all the others."""
