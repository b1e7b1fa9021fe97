"""Sampling on a Ray cluster: the driver's side and that of the actors."""
