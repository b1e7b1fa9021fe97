"""Benchmarks: each module is a command, `python -m benchmarks.sampling --help`; none is a test, none asserts a time."""
