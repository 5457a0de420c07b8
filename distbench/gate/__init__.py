"""Does the candidate run slower than the baseline? Launches in, verdicts out; the launch is the unit.

`compare_sides.gate` compares, `runs.sides` reads. Nothing is imported here, so that the command line starts fast.
"""
