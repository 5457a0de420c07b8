"""What the hosts of a launch must have in common, and which of them answers no more."""
