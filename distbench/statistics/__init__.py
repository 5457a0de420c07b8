"""The one way two things are compared: intervals, families of tests, change points. Arrays in, arrays out."""
