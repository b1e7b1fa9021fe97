"""Systems to compare sampling with; each does the same job with the layout that suits it."""
