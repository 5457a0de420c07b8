"""A case's times over commits, and where they changed for good. Imports nothing: the command line starts fast."""
