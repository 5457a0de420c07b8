"""torchrun, started once on each node."""

import shlex

from distbench.nodes.node_launch import NodeLaunch, run_here
from distbench.spec import UserError

PORT = 29500
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
    return run_here(torchrun_words(asked, where))
