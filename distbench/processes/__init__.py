"""Commands that run under a supervisor: how they are started and stopped, so that none of their processes is left."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distbench.processes.supervisor import GRACE_S, KILL_S, PARENT_PID

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
MARGIN_S = 2.0


def start_supervised(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, grace_s: float = GRACE_S, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a command below a supervisor, in a session of its own; the process returned is the supervisor.

    That process ends when the command has ended and every process that the command left has been killed, with the
    command's exit code or by its signal. The same happens when it gets SIGTERM, or when this process ends, however it
    ends. Outside of Linux the command runs without a supervisor.

    Args:
        command: its words.
        environment: of the command; this process's by default.
        grace_s: seconds from SIGTERM until what still runs is killed.
        options: of `subprocess.Popen`.

    Raises:
        OSError: this machine starts no more processes.
        ValueError: a word or a variable that no process can be given.
    """
    above = [sys.executable, "-IS", SUPERVISOR, str(grace_s)] if sys.platform == "linux" else []
    variables = {**(os.environ if environment is None else environment), PARENT_PID: str(os.getpid())}
    return subprocess.Popen([*above, *command], env=variables, start_new_session=True, **options)


def stop_supervised(process: "subprocess.Popen[bytes]", grace_s: float = GRACE_S) -> None:
    """End what `start_supervised` started, if it still runs, and wait for it; `grace_s` as there."""
    if process.poll() is not None:
        return
    process.terminate()
    process.send_signal(signal.SIGCONT)  # somebody may have stopped it
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s + KILL_S + MARGIN_S)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for a device or a server's disk is not killed before that answers.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
