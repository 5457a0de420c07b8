"""Comparisons of runs: gate, ab, compare, history, links. This file imports nothing: the command line starts fast."""
