"""All comparisons: intervals, families of tests, change points. Arrays in, arrays out."""
