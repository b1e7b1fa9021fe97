"""Sampling in child processes of this machine: both sides of the pipe between them and the parent."""
