"""Communication of a step: each collective with its owner, begin and end."""
