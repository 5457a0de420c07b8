"""Which plan to use: every mesh and change of a plan that is legal, predicted or measured, and one recommended."""
