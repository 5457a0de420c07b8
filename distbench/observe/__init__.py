"""Communication of a step: each collective with its owner, and when it began and ended."""
