"""What the algorithms learn: one runner that trains and evaluates, the CSV files that it writes, and pages of them."""
