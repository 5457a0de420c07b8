"""Which rank, host or link is slow: what a run of scenario `links` says about it."""

from distbench.links.link_measurements import LinkRun, link_run_of
from distbench.links.outliers import LinkVerdict, Outlier, verdict_of

__all__ = ["LinkRun", "LinkVerdict", "Outlier", "link_run_of", "verdict_of"]
