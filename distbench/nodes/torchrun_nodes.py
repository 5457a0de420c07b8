"""torchrun, started once on each node."""

import shlex
import threading
from collections.abc import Callable, Sequence

from distbench.launch.meeting import require_host, why_no_answer
from distbench.nodes.node_launch import NodeLaunch, run_here
from distbench.spec import UserError

PORT = 29500
# With one of these torchrun knows which node this is, or finds out.
SAYS_WHERE = ("--node-rank", "--node_rank", "--rdzv-endpoint", "--rdzv_endpoint")
# After which a node that nobody answers says so: torchrun itself waits for minutes without a word.
TOLD_AFTER_S = 20.0


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
        UserError: of several nodes, which this one is was not said, or the first one's name has no address.
    """
    if asked.num_nodes > 1 and not any(word.startswith(SAYS_WHERE) for word in asked.extra):
        example = "--launcher-args '--node-rank 0 --master-addr HOST --master-port 29500'"
        what = f"torchrun on {asked.num_nodes} nodes is started once on each, and was not told which this is"
        raise UserError(f"{what}; add {example} with each node's rank, or see --print for the commands")
    where, address = asked.extra or ("--standalone",), address_in(asked.extra)
    require_host(address.rpartition(":")[0])

    def ask_there() -> None:
        if why := why_no_answer(address):
            what = f"nothing answers at {address} after {TOLD_AFTER_S:.0f} s ({why}), and torchrun goes on waiting"
            say(f"distbench: {what}; --master-addr must be the first node, whose port is open to the others")

    watch = threading.Timer(TOLD_AFTER_S, ask_there)
    watch.daemon = True
    if address:
        watch.start()
    try:
        return run_here(torchrun_words(asked, where))
    finally:
        watch.cancel()


def address_in(words: Sequence[str]) -> str:
    """`HOST:PORT` at which torchrun's nodes meet, out of its words; "" where they name none."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    given = {
        name.lstrip("-").replace("_", "-"): value or after
        for word, after in pairs
        for name, _, value in [word.partition("=")]
        if name.startswith("--")
    }
    if endpoint := given.get("rdzv-endpoint"):
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    else:
        host, port = given.get("master-addr", ""), given.get("master-port", "")
    return f"{host}:{port if port.isdecimal() else PORT}" if host else ""
