"""One `distbench run` on many nodes: the words of its command, and which words of --launcher-args are refused."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.processes import start_supervised, stop_supervised
from distbench.spec import UserError

END_TIMEOUT_S = 15.0  # for ranks that end their run files


@dataclass(frozen=True)
class NodeLaunch:
    """What is to be launched, and on how many nodes.

    Args:
        arguments: the words after `distbench run`, without those that say where it runs.
        num_nodes, ranks_per_node: both at least 1; the mesh multiplies to their product.
        device: type of device that each rank takes one of.
        out: results folder, which all nodes share.
        name: for the job, from what is measured.
        extra: further words for the launcher.
        timeout_s: after which ranks that get no further are given up.
    """

    arguments: tuple[str, ...]
    num_nodes: int
    ranks_per_node: int
    device: str
    out: Path
    name: str
    extra: tuple[str, ...] = ()
    timeout_s: float = 300.0

    @property
    def command(self) -> list[str]:
        """What each rank runs: this Python, and the command."""
        return [sys.executable, "-m", "distbench", "run", *self.arguments]


def launcher_here() -> str:
    """Slurm where its commands are, else torchrun."""
    return "slurm" if shutil.which("sbatch") else "torchrun"


def require_program(name: str, launcher: str, advice: str, path: str | None = None) -> None:
    """Refuse a launcher whose program is not here.

    Raises:
        UserError: `name` is not on `path`, by default this process's.
    """
    if not shutil.which(name, path=path):
        other_launchers = ", ".join(candidate for candidate in COUNTS if candidate != launcher)
        raise UserError(
            f"--launcher {launcher} needs the program {name}, which is not here; {advice}, or use {other_launchers}"
        )


def run_here(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    watch: Callable[["subprocess.Popen[bytes]"], None] | None = None,
    stderr: int | None = None,
) -> int:
    """Run a launcher to its end, with this process's streams; its exit code, 130 after Ctrl-C.

    What it started ends with it, and it ends with this process.

    Args:
        command, environment: of its process.
        watch: called with that on a thread of its own.
        stderr: subprocess.PIPE where the watch reads what it complains of; None for this process's.

    Raises:
        UserError: it cannot be started.
    """
    try:
        process = start_supervised(command, environment=environment, grace_s=END_TIMEOUT_S, stderr=stderr)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started ({error}); see `--dry-run` for the command") from error
    if watch:
        threading.Thread(target=watch, args=(process,), daemon=True).start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        stop_supervised(process, END_TIMEOUT_S)
        raise
    return code if code >= 0 else 128 - code


# Options by name, with their short form: distbench says how many nodes and ranks there are.
COUNTS = {
    "torchrun": {"--nnodes": "", "--nproc-per-node": "", "--standalone": ""},
    "slurm": {"--nodes": "-N", "--ntasks": "-n", "--ntasks-per-node": ""},
    "torchx": {"--j": "-j"},
}
OWN_COUNTS = "how many nodes and ranks there are is said by --nodes and --ranks-per-node; leave it out"


def refuse_words(options: Mapping[str, str], words: Sequence[str], why: str) -> None:
    """Refuse words of --launcher-args that are one of the options, which launchers also take shortened.

    Args:
        options: long name to short name, empty for none.
        why: the end of the sentence.

    Raises:
        UserError: there is such a word.
    """
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        for name, short in options.items():
            is_long = len(option) > len("--") and option.startswith("--") and name.startswith(option)
            if is_long or (short and word.startswith(short)):
                raise UserError(f"--launcher-args {word}: {why}")
