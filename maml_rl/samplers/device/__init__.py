"""Phases that never leave an accelerator: the loop, what it records, and its random streams."""
