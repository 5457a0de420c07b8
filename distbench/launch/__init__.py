"""Launch of a request: make its jobs, start and watch the ranks, and report the result of each job."""

from distbench.launch.job_request import Request, jobs_of, jobs_of_entries
from distbench.launch.rank_processes import RankProcesses
from distbench.launch.run_job import MODULE, JobOutcome, launch, launch_on

__all__ = ["MODULE", "JobOutcome", "RankProcesses", "Request", "jobs_of", "jobs_of_entries", "launch", "launch_on"]
