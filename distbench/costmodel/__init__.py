"""The cost of collectives on one machine: fitted lines, the profile that keeps them, and the run they come from."""
