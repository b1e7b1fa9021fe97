"""The loop of one phase, wherever it runs: observe, act, step, record."""
