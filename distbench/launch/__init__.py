"""From a request to finished run files: make the jobs, start the ranks, watch them, say what became of them."""

from distbench.launch.request import Request, jobs_of, jobs_of_entries
from distbench.launch.run_job import JobOutcome, launch

__all__ = ["JobOutcome", "Request", "jobs_of", "jobs_of_entries", "launch"]
