"""Redistributions by planner: the table of pairs, the comparisons, the failures, and their reproducers."""
