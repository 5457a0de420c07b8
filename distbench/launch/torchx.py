"""TorchX, which reaches Kubernetes, AWS Batch, Docker and others: its component dist.ddp runs torchrun on each node."""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from distbench.launch.nodes import COUNTS, OWN_COUNTS, NodeLaunch, refuse_words, require_program, run_here
from distbench.spec.printable_text import cut

SPLIT = "--"
# How Python begins to tell of an error; a rank's stands behind the rank's name.
TRACEBACK = "Traceback (most recent call last):"
READ_S = 5.0


def torchx_words(asked: NodeLaunch) -> list[str]:
    """`torchx run ...`: of the further words, those before `--` are for `torchx run`, those after it for dist.ddp.

    Source: TorchX 0.7, `torchx run --help` and the component dist.ddp.
    """
    words = list(asked.extra)
    at = words.index(SPLIT) if SPLIT in words else len(words)
    of_run, of_component = words[:at], words[at + 1 :]
    counts = ["-j", f"{asked.num_nodes}x{asked.ranks_per_node}", "--name", asked.name]
    if asked.device != "cpu" and "--gpu" not in of_component:
        counts += ["--gpu", str(asked.ranks_per_node)]
    _python, _m, module, *arguments = asked.command
    return [
        "torchx",
        "run",
        "--wait",
        "--log",
        *of_run,
        "dist.ddp",
        *counts,
        *of_component,
        "-m",
        module,
        "--",
        *arguments,
    ]


def torchx_line(asked: NodeLaunch) -> str:
    """Return the command for a shell."""
    return shlex.join(torchx_words(asked))


def run_by_torchx(asked: NodeLaunch, say: Callable[[str], None]) -> int:
    """Submit, follow the log to the end; torchx's exit code.

    A scheduler of this host finds torchrun beside this Python, whether or not a shell's path has it.

    Raises:
        UserError: torchx is not here.
    """
    refuse_words(COUNTS["torchx"], asked.extra, OWN_COUNTS)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    require_program("torchx", "torchx", "install it (pip install 'distbench[torchx]')", path)
    complaint = _Complaint(say)
    code = run_here(torchx_words(asked), {**os.environ, "PATH": path}, complaint.follow, stderr=subprocess.PIPE)
    complaint.is_read.wait(READ_S)
    if complaint.last:
        advice = (
            "choose another of its schedulers by --launcher-args '--scheduler NAME', or see --dry-run for the command"
        )
        say(f"distbench: torchx failed ({cut(complaint.last)}); {advice}")
    elif code:
        say(f"torchx ended with {code}; what was finished is in {asked.out}, where the job sees this folder")
    return code


class _Complaint:
    """Shows what torchx says, but for its tracebacks: of them, the last line is kept."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.last, self.is_read = "", threading.Event()
        self._say = say

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Read standard error to its end."""
        assert process.stderr is not None
        is_shown = False
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            is_shown = is_shown or line == TRACEBACK
            if not is_shown:
                self._say(line)
            elif line and not line.startswith((" ", TRACEBACK)):
                self.last = line
        self.is_read.set()
