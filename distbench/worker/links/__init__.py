"""Links between ranks, and each rank's own speed: the cases that say which of them is slow."""

from distbench.worker.links.link_cases import link_cases

__all__ = ["link_cases"]
