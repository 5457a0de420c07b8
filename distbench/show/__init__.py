"""Presentation: blocks as text, Markdown and HTML; units, plot style, and formats for CI systems."""
