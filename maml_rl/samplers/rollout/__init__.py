"""The loop of one phase, in every placement: observe, act, step, record."""
