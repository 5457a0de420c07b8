"""Communication signatures: what a scenario communicates, written in seconds with no rank started, and compared."""

from distbench.signature.difference import differences, incomparable
from distbench.signature.make import signatures_of
from distbench.signature.signature_file import Path, Signature, counted, load, parse

__all__ = ["Path", "Signature", "counted", "differences", "incomparable", "load", "parse", "signatures_of"]
