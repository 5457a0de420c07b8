"""distbench: what a parallelism plan costs on this hardware, and which part of it costs that."""

__version__ = "0.1.0"
