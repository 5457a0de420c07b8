"""How tests start processes: for real, or forked from one that has torch imported. Reached through fixtures only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from distbench.cli.main import main
from distbench.launch import JobOutcome, RankProcesses, launch, launch_on
from distbench.launch.display import Display
from distbench.spec import Job
from processes.server import ForkServer, SharedServer, search_path, wait_for

FOLDER = Path(__file__).parent
__all__ = ["PATIENCE_S", "Children", "Ranks", "SharedServer", "slowness"]
# A deadline that only a failure reaches: on a machine with 14 processes per CPU, what takes a second takes many.
PATIENCE_S = 120
LIMIT_S, WORK_S = 300, 0.2
# A rank of somebody's launch, or a worker of pytest-xdist, is nothing that a child should take itself for.
NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_XDIST")
WORKER = ("-m", "distbench.worker")


def slowness() -> float:
    """Return how many times longer than on an idle machine this process's work takes now.

    For a deadline that a test has to reach: it must be long enough for what comes before, and no longer.
    """
    began, worked = time.monotonic(), time.thread_time()
    while time.thread_time() - worked < WORK_S:
        pass
    return (time.monotonic() - began) / WORK_S


def heed_signals() -> None:
    """No signal that ends a command is ignored from here on."""
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


class Children:
    """Starts child processes.

    Args:
        root: the repository: where they start, and whose code they find first.
        folder: for the stand-in for `sys.executable`.
        address: of a server that forks processes, where there is one already.
    """

    def __init__(self, root: Path, folder: Path, address: Path | None = None) -> None:
        self._root, self._folder, self._address = root, folder, address
        self._server: ForkServer | None = None

    def run(self, *command: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` with the output captured.

        Args:
            command: its words.
            options: of `subprocess.run`; `variables` are environment variables beside this process's own.
        """
        captured = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        usual = {"stdin": subprocess.DEVNULL, "timeout": LIMIT_S, **captured}
        return subprocess.run([str(word) for word in command], **{**usual, **self._surroundings(options)})

    def start(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen` with the same options; it may be sent SIGINT and SIGHUP."""
        return subprocess.Popen(
            [str(word) for word in command],
            # A suite started in the background, or by nohup, hands ignored signals down; a person's terminal does not.
            preexec_fn=heed_signals,
            **self._surroundings(options),
        )

    def python(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS`, started anew."""
        return self.run(sys.executable, *arguments, **options)

    def cli(
        self,
        *arguments: object,
        real: bool = False,
        timeout: float = LIMIT_S,
        cwd: Path | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """`distbench ARGUMENTS` as a process of its own: forked, or with `real` started anew as a user does."""
        python = sys.executable if real else self.forked_python
        command = (python, "-m", "distbench", *arguments)
        return self.run(*command, variables=variables, timeout=timeout, cwd=cwd or self._root)

    @cached_property
    def forked_python(self) -> str:
        """A stand-in for `sys.executable` that has torch imported, where the start is not what is tested."""
        if self._address is None:
            self._server = ForkServer(self._root)
            self._address = self._server.address
        wait_for(self._address)
        client = self._folder / "python"
        lines = f"#!{sys.executable} -IS", "import sys", f"sys.path.insert(0, {str(FOLDER)!r})"
        client.write_text(
            "\n".join([*lines, "import forked_python", f"forked_python.main({str(self._address)!r})", ""])
        )
        client.chmod(0o755)
        return str(client)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Have whatever this process starts with `sys.executable` forked."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "executable", self.forked_python)
            patched.setenv("PYTHONPATH", search_path(self._root))
            yield

    def close(self) -> None:
        """End the server, if it is this one's own."""
        if self._server is not None:
            self._server.close()

    def _surroundings(self, options: dict[str, Any]) -> dict[str, Any]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        environment = {**inherited, "PYTHONPATH": search_path(self._root), **options.pop("variables", {})}
        return {"cwd": self._root, "env": environment, "text": True, **options}


class Ranks(Children):
    """Launches ranks, too."""

    def launch(self, job: Job, module: tuple[str, ...] = WORKER) -> JobOutcome:
        """Launch the job's ranks; what launches them is forked."""
        with self.forked():
            return launch(job, None, Display(), module)

    def launch_all(self, jobs: list[Job], module: tuple[str, ...] = WORKER) -> list[JobOutcome]:
        """Launch the jobs as one command does: those of one number of ranks share a launch."""
        with self.forked(), RankProcesses(jobs, None, module) as ranks:
            return [launch_on(ranks, job, Display()) for job in jobs]

    def run_forked(self, num_ranks: int, *program: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """So many ranks of a program (a file, or -m and a module; and its arguments), forked without torchrun."""
        return self.run(*self._forking(num_ranks, *program), **options)

    def torchrun(self, num_ranks: int, *program: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """torchrun of so many ranks on this host, itself and its ranks forked.

        Args:
            num_ranks: how many.
            program: a file, or -m and a module; and its arguments.
            options: of `run`.
        """
        words = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
        return self.run(self.forked_python, *words, *program, **options)

    def _forking(self, *arguments: object) -> tuple[object, ...]:
        return self.forked_python, FOLDER / "forking.py", *arguments

    def run_here(self, *arguments: str, cwd: Path | None = None) -> Result:
        """`distbench ARGUMENTS` in this process, its ranks forked."""
        with self.forked(), pytest.MonkeyPatch.context() as patched:
            patched.chdir(cwd or self._root)
            return CliRunner().invoke(main, arguments)
