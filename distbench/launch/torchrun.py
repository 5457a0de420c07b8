"""torchrun, started once on each node."""

import contextlib
import itertools
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from distbench.launch.nodes import COUNTS, OWN_COUNTS, NodeLaunch, refuse_words, run_here
from distbench.launch.rendezvous import require_host, require_own, why_no_answer
from distbench.spec import UserError

PORT = 29500
# With one of these torchrun knows which node this is, or finds out.
SAYS_WHERE = ("node-rank", "rdzv-endpoint")
# What torchrun also takes from its variables, PET_NODE_RANK and so on.
TOLD = (*SAYS_WHERE, "master-addr", "master-port")
# After which a node that waits says so: torchrun itself waits for minutes without a word.
TOLD_AFTER_S, POLL_S = 20.0, 0.5


def torchrun_words(asked: NodeLaunch, where: tuple[str, ...]) -> list[str]:
    """torchrun's command for one node; `where` says which node it is and where they meet."""
    counts = [f"--nnodes={asked.num_nodes}", f"--nproc-per-node={asked.ranks_per_node}"]
    return [asked.command[0], "-m", "torch.distributed.run", *counts, *where, *asked.command[1:]]


def torchrun_lines(asked: NodeLaunch) -> str:
    """For a shell: the command of each node; HOST stands for the name or address of the first."""
    if asked.extra:
        return shlex.join(torchrun_words(asked, asked.extra))
    lines = []
    for rank in range(asked.num_nodes):
        where = (f"--node-rank={rank}", "--master-addr=$HOST", f"--master-port={PORT}")
        lines.append(
            f"# node {rank}\n"
            + shlex.join(torchrun_words(asked, where)).replace("'--master-addr=$HOST'", "--master-addr=$HOST")
        )
    return "\n".join(["HOST=first-node", *lines])


def run_by_torchrun(asked: NodeLaunch, say: Callable[[str], None]) -> int:
    """Run this node's part; its exit code.

    Raises:
        UserError: of several nodes, which this one is was not said, or cannot be; or they cannot meet where they were
            told to.
    """
    refuse_words(COUNTS["torchrun"], asked.extra, OWN_COUNTS)
    options = _options(asked.extra)
    _require_which(asked, options)
    where, address = asked.extra or (("--standalone",) if asked.num_nodes == 1 else ()), address_in(asked.extra)
    require_host(address.rpartition(":")[0])
    if address and "rdzv-endpoint" not in options and options.get("node-rank", "0") == "0":
        require_own(address)
    watch = _Watch(address, asked, say)
    code = run_here(torchrun_words(asked, where), watch=watch.follow if address else None)
    if watch.given_up:
        raise UserError(watch.given_up)
    return code


def _require_which(asked: NodeLaunch, given: dict[str, str]) -> None:
    rank, nodes = given.get("node-rank"), asked.num_nodes
    if rank is not None and not (rank.isascii() and rank.isdecimal() and int(rank) < nodes):
        raise UserError(f"--node-rank {rank} is none of {nodes} nodes; give each one of 0 to {nodes - 1}")
    if nodes > 1 and not given.keys() & set(SAYS_WHERE):
        example = "--launcher-args '--node-rank 0 --master-addr HOST --master-port 29500'"
        problem = f"torchrun on {nodes} nodes is started once on each, and was not told which this is"
        raise UserError(f"{problem}; add {example} with each node's rank, or see --dry-run for the commands")
    if nodes > 1 and not address_in(asked.extra):
        problem = f"torchrun on {nodes} nodes was told that this is node {rank}, and not where they meet"
        raise UserError(f"{problem}; add --master-addr HOST to --launcher-args, HOST being node 0")


class _Watch:
    """Says when a node has waited long for the others, which torchrun does not; and gives up at the run's timeout.

    Args:
        address: where they meet.
        asked: the launch.
        say: is given a sentence.
    """

    def __init__(self, address: str, asked: NodeLaunch, say: Callable[[str], None]) -> None:
        self.given_up = ""
        self._address, self._asked, self._say = address, asked, say

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Return when torchrun has started ranks, which speak for themselves, or has ended."""
        began, is_shown = time.monotonic(), False
        while process.poll() is None and not _has_children(process.pid):
            waited_s = time.monotonic() - began
            if waited_s >= TOLD_AFTER_S and not is_shown:
                is_shown = True
                self._say(f"distbench: {self._why(waited_s)}")
            if waited_s >= self._asked.timeout_s:
                self.given_up = self._why(waited_s)
                process.kill()  # it has no ranks, and would tell its end by a traceback
                return
            time.sleep(POLL_S)

    def _why(self, waited_s: float) -> str:
        waited = f"torchrun has waited {waited_s:.0f} s here"
        if why := why_no_answer(self._address):
            advice = "--master-addr must be the first node, whose port is open to the others"
            return f"{waited}, and nothing answers at {self._address} ({why}); {advice}"
        count = self._asked.num_nodes
        return (
            f"{waited} for {count} nodes to meet at {self._address}, which answers; start the command on each of them"
        )


def _has_children(pid: int) -> bool:
    """Whether a process has started others; True where the system does not say."""
    children = []
    with contextlib.suppress(OSError):
        children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return any(children) or not children


def address_in(words: Sequence[str]) -> str:
    """`HOST:PORT` at which torchrun's nodes meet, out of its words; "" where they name none."""
    options = _options(words)
    if endpoint := options.get("rdzv-endpoint"):
        host, _, port = (
            endpoint.rpartition(":") if not endpoint.endswith("]") and ":" in endpoint else (endpoint, "", "")
        )
    else:
        host, port = options.get("master-addr", ""), options.get("master-port", "")
    return f"{host.strip('[]')}:{port if port.isdecimal() else PORT}" if host else ""


def _options(words: Sequence[str]) -> dict[str, str]:
    """Values of torchrun's options by name, which it takes with hyphens and with underscores, or from variables."""
    pairs = itertools.pairwise([*words, ""])
    variables = {name: os.environ.get(f"PET_{name.replace('-', '_').upper()}", "") for name in TOLD}
    return {name: value for name, value in variables.items() if value} | {
        name.lstrip("-").replace("_", "-"): value or after
        for word, after in pairs
        for name, _, value in [word.partition("=")]
        if name.startswith("--")
    }
