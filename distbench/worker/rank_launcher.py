"""`python -m distbench.worker.rank_launcher RANKS PROGRAM JOB.json...`: fork the ranks of jobs on this host.

This process imports torch once without using torch, and forks every rank of a job as soon as the job's file exists, one
job after another. Therefore patched modules, compiled code, threads, caches and memory of one job do not affect the
next job. The jobs share only the time of imports.
"""

import contextlib
import gc
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from distbench.processes.supervisor import adopt_orphans, die_with_parent, end_descendants
from distbench.ranks.failure import one_line, report_failure
from distbench.ranks.measure import SPENT_BEFORE
from distbench.records.progress_events import FILE_NAME, ProgressWriter
from distbench.spec import Job, UserError
from distbench.spec.devices import NUMA_BINDING
from distbench.spec.errors import StorageFailed
from distbench.spec.job import LAUNCH_LOG, pid_file
from distbench.worker import leave

STARTED_S = time.monotonic()
POLL_S = 0.01
TERMINATE_WAIT_S = 3.0
HOST = "127.0.0.1"
COMPILES, COMPILE_KNOBS = "CompilePlan", {"plan.compile", "plan.loss"}


def main(num_ranks: int, program: Sequence[str], job_files: Sequence[Path]) -> NoReturn:
    """Run the jobs in order and end this process: 0 if all ranks succeeded, else 1.

    Args:
        num_ranks: number of ranks of each job.
        program: a Python file, or "-m" and a module; each rank runs it with the path of the job's file.
        job_files: one file per job. The first file exists; after each job the launcher waits for the next job's file.
    """
    die_with_parent()
    adopt_orphans()
    log_dir = job_files[0].parent
    try:
        first = Job.load(job_files[0])
        _import_for(first)
        gc.freeze()  # imported objects remain in memory pages that all ranks share
        SPENT_BEFORE.update(launch=max(STARTED_S - first.started_clock_s, 0.0), imports=time.monotonic() - STARTED_S)
        ranks = Ranks(num_ranks, program)
        signal.signal(signal.SIGTERM, ranks.end_by_signal)
        for number, file in enumerate(job_files, start=1):
            while not file.exists():  # this process ends if the parent ends without writing the file
                time.sleep(POLL_S)
            log_dir = file.parent
            _log_to(log_dir / LAUNCH_LOG)
            _import_more_for(Job.load(file))
            if not ranks.run(file):
                leave(1)
            SPENT_BEFORE.clear()
            if number < len(job_files):
                progress = ProgressWriter(log_dir / FILE_NAME)
                progress.tell("left")
                progress.close()
    except (UserError, StorageFailed) as error:
        report_failure(log_dir, 0, "storage" if isinstance(error, StorageFailed) else "user", str(error))
        leave(1)
    leave(0)


class Ranks:
    """The ranks of the current job, and their store, which exists longer than any rank."""

    def __init__(self, num_ranks: int, program: Sequence[str]) -> None:
        self._num_ranks, self._program = num_ranks, list(program)
        self._running: dict[int, int] = {}  # pid to rank

    def run(self, job_file: Path) -> bool:
        """Fork the ranks of a job, wait for their end, and return whether all succeeded; if a rank fails, end the other
        ranks."""
        from torch.distributed import TCPStore

        with socket.socket() as listener:
            listener.bind((HOST, 0))
            listener.listen(self._num_ranks)
            port = listener.getsockname()[1]
            for rank in range(self._num_ranks):
                self._running[self._fork(rank, port, job_file)] = rank
            # The store's thread must not exist when ranks are forked.
            store = TCPStore(
                HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        while self._running:
            pid, status = os.wait()
            rank, exit_code = self._running.pop(pid, -1), os.waitstatus_to_exitcode(status)
            if rank >= 0 and (exit_code or pid_file(job_file.parent, rank).exists()):
                print(f"rank {rank} ended with exit code {exit_code}", flush=True)
                self._end()
                return False
        del store
        end_descendants()  # remaining processes of ranks would disturb the next job
        return True

    def _fork(self, rank: int, port: int, job_file: Path) -> int:
        # Without this, a new rank would have this process's handler, which ends the other ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if pid:
            return pid
        try:
            os.environ.update(_variables(rank, self._num_ranks, port))
            if not _is_bound(rank, job_file.parent):
                leave(1)
            *how, program = self._program
            sys.argv = [program, str(job_file)]
            runpy.run_module(program, run_name="__main__") if how else runpy.run_path(program, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            leave(1)
        leave(0)

    def _end(self) -> None:
        """Terminate the ranks, and kill ranks that do not end."""
        for signum, wait_s in ((signal.SIGTERM, TERMINATE_WAIT_S), (signal.SIGKILL, TERMINATE_WAIT_S)):
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            deadline = time.monotonic() + wait_s
            while self._running and time.monotonic() < deadline:
                try:
                    pid, _ = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:  # the signal arrived between the last rank's end and its record
                    return self._running.clear()
                self._running.pop(pid, None)
                if not pid:
                    time.sleep(POLL_S)

    def end_by_signal(self, signum: int, _: Any) -> None:
        """Handle a signal: end the ranks, then end this process by the same signal."""
        self._end()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _is_bound(rank: int, log_dir: Path) -> bool:
    """Bind this rank to CPUs as requested; after a failure, report the reason and return False."""
    if mode := os.environ.get(NUMA_BINDING):
        from distbench.torch_private import Unsupported, bind_to_numa_node

        try:
            bind_to_numa_node(rank, mode)
        except (UserError, Unsupported) as error:
            why = str(error)
        except Exception as error:  # torch 2.13 supports only CUDA, and containers may hide system files
            problem = f"{NUMA_BINDING}={mode}: torch cannot bind rank {rank} near a device ({one_line(error)})"
            why = f"{problem}; unset {NUMA_BINDING}"
        else:
            return True
        report_failure(log_dir, rank, "user", why)
        return False
    return True


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of this host, with the store of this process instead of rank 0's."""
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), num_ranks),
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in variables.items()}


def _import_for(job: Job) -> None:
    """Import modules that ranks of jobs on such a device need. For an accelerator, import only the modules that every
    job needs, because other imports might use the device, and a forking process must not use the device.
    """
    import distbench.worker.rank_session  # noqa: F401

    if job.device == "cpu":
        import torch
        import torch.distributed.fsdp
        import torch.distributed.tensor.parallel

        torch.compiler.reset()  # imports the compiler, which torch's optimizers also need


def _import_more_for(job: Job) -> None:
    """Import the compiler once for all ranks if the scenario's text or variants refer to it."""
    compiles = any(COMPILE_KNOBS & variant.keys() for variant in job.variants)
    if job.device == "cpu" and (compiles or COMPILES in Path(job.file).read_text(encoding="utf-8", errors="replace")):
        from distbench.torch_private import import_compiler

        began_s = time.monotonic()
        import_compiler()
        gc.freeze()
        SPENT_BEFORE["imports"] = SPENT_BEFORE.get("imports", 0.0) + time.monotonic() - began_s


def _log_to(path: Path) -> None:
    """Redirect this process's output to a log; if the disk is full, the job's ranks end and report this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)


if __name__ == "__main__":
    length = 2 if sys.argv[2] == "-m" else 1
    main(int(sys.argv[1]), sys.argv[2 : 2 + length], [Path(word) for word in sys.argv[2 + length :]])
