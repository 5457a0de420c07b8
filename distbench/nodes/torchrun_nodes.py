"""torchrun, started once on each node."""

import shlex
import socket
import sys
import threading
import time
from collections.abc import Sequence

from distbench.nodes.node_launch import NodeLaunch, run_here
from distbench.spec import UserError

PORT = 29500
TOLD_AFTER_S, CONNECT_S = 20.0, 3.0
# With one of these torchrun knows which node this is, or finds out.
SAYS_WHERE = ("--node-rank", "--node_rank", "--rdzv-endpoint", "--rdzv_endpoint")


def torchrun_words(asked: NodeLaunch, where: tuple[str, ...]) -> list[str]:
    """torchrun's command for one node; `where` says which node it is and where they meet."""
    counts = [f"--nnodes={asked.num_nodes}", f"--nproc-per-node={asked.ranks_per_node}"]
    return [asked.command[0], "-m", "torch.distributed.run", *counts, *where, *asked.command[1:]]


def torchrun_lines(asked: NodeLaunch) -> str:
    """For a shell: the command of each node; HEAD stands for the name or address of the first."""
    if asked.extra:
        return shlex.join(torchrun_words(asked, asked.extra))
    lines = []
    for rank in range(asked.num_nodes):
        where = (f"--node-rank={rank}", "--master-addr=$HEAD", f"--master-port={PORT}")
        lines.append(
            f"# node {rank}\n"
            + shlex.join(torchrun_words(asked, where)).replace("'--master-addr=$HEAD'", "--master-addr=$HEAD")
        )
    return "\n".join(["HEAD=first-node", *lines])


def run_by_torchrun(asked: NodeLaunch) -> int:
    """Run this node's part; its exit code.

    Raises:
        UserError: of several nodes, which this one is was not said.
    """
    if asked.num_nodes > 1 and not any(word.startswith(SAYS_WHERE) for word in asked.extra):
        example = "--launcher-args '--node-rank 0 --master-addr HOST --master-port 29500'"
        what = f"torchrun on {asked.num_nodes} nodes is started once on each, and was not told which this is"
        raise UserError(f"{what}; add {example} with each node's rank, or see --print for the commands")
    where = asked.extra or ("--standalone",)
    if address := head_of(asked.extra):
        threading.Thread(target=_say_where_nobody_answers, args=address, daemon=True).start()
    return run_here(torchrun_words(asked, where))


def head_of(words: Sequence[str]) -> tuple[str, int] | None:
    """(host, port) of the first node, where torchrun's words name it."""
    told = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        told[name.replace("_", "-")] = value or after
    host, port = told.get("--master-addr"), told.get("--master-port", str(PORT))
    return (host, int(port)) if host and port.isdecimal() else None


def _say_where_nobody_answers(host: str, port: int) -> None:
    """torchrun itself waits for a first node that does not answer, in silence and for long."""
    time.sleep(TOLD_AFTER_S)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        where = f"{host}:{port}, where torchrun meets the first node"
        what = f"{TOLD_AFTER_S:.0f} s after the start nothing answers at {where}"
        advice = "--master-addr must be that node, its port open, and the network between them up"
        print(f"distbench: {what} ({error}); {advice}", file=sys.stderr, flush=True)
