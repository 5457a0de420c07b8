"""Does the candidate run slower than the baseline? Launches in, verdicts out; the launch is the unit.

`gate.gate` compares, `launches.read_side` reads. Nothing is imported here, so that the command line starts fast.
"""
