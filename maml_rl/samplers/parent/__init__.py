"""The side of the process boundary that the trainer is on: it starts, watches and replaces the workers."""
