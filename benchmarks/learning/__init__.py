"""Returns of the algorithms: one runner trains and evaluates them, writes CSV files, and makes pages from these."""
