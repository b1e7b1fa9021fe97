"""The side of the process boundary that a worker is on: it makes environments and steps them."""
