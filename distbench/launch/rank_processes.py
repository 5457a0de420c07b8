"""The processes of a job's ranks."""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from distbench.launch.rendezvous import Joined, launcher_command, rank_environment
from distbench.processes import start_supervised, stop_supervised
from distbench.spec import Job, UserError
from distbench.spec.job import JOB_FILE, LAUNCH_LOG
from distbench.spec.mesh import mesh_size


class RankProcesses:
    """The rank processes of some jobs, in the order of the jobs.

    Consecutive jobs with the same number of ranks and the same device share a launch. The launcher starts with the
    first job, and forks the ranks of each further job as soon as the job's file is written. If a launch ends early, a
    new launch runs the remaining jobs.

    Args:
        jobs: all jobs; their log folders must not change except for a relaunch.
        joined: the other launcher's launch that started this process as a rank; None to start the ranks on this host.
        module: the program of a rank: a Python file, or -m and a module. Tests give other programs.
    """

    def __init__(self, jobs: Sequence[Job], joined: Joined | None, module: tuple[str, ...]) -> None:
        self.joined = joined
        self.log = Path()
        self._jobs, self._module = list(jobs), module
        self._process: subprocess.Popen[bytes] | None = None
        self._expected: list[Path] = []

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The pid of the supervisor of the launcher, or of the only rank on this host."""
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """The exit code of the launcher, or of the only rank on this host; None while a process of the launch runs."""
        return self._process.poll() if self._process else None

    @property
    def are_kept(self) -> bool:
        """Whether the ranks wait for another job after the current job."""
        return bool(self._expected)

    def begin(self, job: Job) -> None:
        """Run a job on waiting ranks or new ranks. The job's file already exists.

        Raises:
            UserError: the machine's limit on processes is reached.
            OSError: the log folder cannot be written.
        """
        path = Path(job.log_dir) / JOB_FILE
        if self._process and self._process.poll() is None and self._expected[:1] == [path]:
            del self._expected[0]
            self.log = path.parent / LAUNCH_LOG
            return
        self.stop()
        self._expected = [Path(later.log_dir) / JOB_FILE for later in self.after(job)]
        self._start(job, [path, *self._expected])

    def after(self, job: Job) -> list[Job]:
        """The later jobs that share the launch of a job."""
        if self.joined:
            return []
        place = next(number for number, other_job in enumerate(self._jobs) if other_job.run_id == job.run_id)
        needs = mesh_size(job.mesh), job.device
        return list(takewhile(lambda other: (mesh_size(other.mesh), other.device) == needs, self._jobs[place + 1 :]))

    def _start(self, job: Job, paths: Sequence[Path]) -> None:
        """Start the launcher, or this process's rank if another launcher started it."""
        log_dir, joined = Path(job.log_dir), self.joined
        if joined:
            command = [sys.executable, *self._module, *map(str, paths)]
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.log = log_dir / f"launch-rank{joined.rank}.log"
        else:
            ranks_here = mesh_size(job.mesh)
            command = launcher_command(ranks_here, self._module, paths)
            self.log = log_dir / LAUNCH_LOG
        environment = rank_environment(ranks_here, int(job.environment["num_cpus"]), joined.variables if joined else {})
        with self.log.open("ab") as output:
            try:
                self._process = start_supervised(
                    command, environment=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            except OSError as error:
                problem = f"the ranks cannot be started ({error})"
                raise UserError(f"{problem}; `ulimit -a` shows the limits of this shell") from error

    def stop(self) -> None:
        """End the launch if it still runs, and all processes that the ranks started."""
        self._expected = []
        if self._process is not None:
            stop_supervised(self._process)
