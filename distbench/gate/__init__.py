"""Launches in, verdicts out: does the candidate run slower? Imports nothing, so that the command line starts fast."""
