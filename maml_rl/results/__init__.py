"""What runs achieved: groups of runs, evaluations, intervals, and which of them is better; it samples nothing."""
