"""The one way two things are compared: intervals, pairs of launches, families of tests. Arrays in, arrays out."""
