"""Phases that never leave an accelerator: the loop, what it records, its random streams, and its graphs."""
