"""Benchmarks: each module is a command, such as `python -m benchmarks.sampling --help`; none of them asserts a time."""
