"""The version of distbench."""

__version__ = "0.1.0"
