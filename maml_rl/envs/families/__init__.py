"""The families whose dynamics are array code of this package."""
