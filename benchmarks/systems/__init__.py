"""The systems that sampling is compared with, each doing the same job with the layout that suits it."""
