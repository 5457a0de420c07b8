"""All comparisons of arrays: intervals, families of tests, change points."""
