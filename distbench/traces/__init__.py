"""Traced steps: which path costs what, as tables, a timeline, a trace file, and one step held against another."""
