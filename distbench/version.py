"""The one place that says which distbench this is."""

__version__ = "0.1.0"
