"""What a step communicates: each collective with its owner, and when it began and ended."""
