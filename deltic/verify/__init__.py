"""Checks of a model's files, and of what Deltic makes of them, against others: `deltic verify`."""
