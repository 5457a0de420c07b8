"""Comparisons of runs: gate, ab, compare, history, links. For a fast start of commands, this file imports nothing."""
