"""Choice of a plan: every legal mesh and change of a plan, predicted or measured, and one recommendation."""
