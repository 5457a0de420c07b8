"""Words of --launcher-args that would have the launcher start something else than what was asked for."""

from collections.abc import Mapping, Sequence

from distbench.nodes.node_launch import NodeLaunch
from distbench.spec import UserError

# Options by name, with their short form: how many nodes and ranks there are is distbench's to say.
COUNTS = {
    "torchrun": {"--nnodes": "", "--nproc-per-node": "", "--standalone": ""},
    "slurm": {"--nodes": "-N", "--ntasks": "-n", "--ntasks-per-node": ""},
    "torchx": {"--j": "-j"},
}
# Words of sbatch for something else than one job whose output is shown; with --chdir, results would be elsewhere.
NOT_FOLLOWED = {"--array": "-a", "--wait": "-W", "--test-only": "", "--output": "-o", "--error": "-e", "--chdir": "-D"}


def require_own_counts(asked: NodeLaunch, launcher: str) -> None:
    """Refuse words that say how many nodes or ranks there are.

    Raises:
        UserError: there is one.
    """
    if word := _first_of(COUNTS[launcher], asked.extra):
        what = f"--launcher-args {word}: how many nodes and ranks there are is said by --nodes and --ranks-per-node"
        raise UserError(f"{what}; leave it out")


def require_one_job(words: Sequence[str]) -> None:
    """Refuse words with which sbatch makes no job, several, or puts their output elsewhere.

    Raises:
        UserError: there is one.
    """
    if word := _first_of(NOT_FOLLOWED, words):
        what = f"--launcher-args {word}: distbench submits one job and shows its output"
        raise UserError(f"{what}; leave it out, or give the file that --dry-run shows to sbatch yourself")


def require_one_line(words: Sequence[str]) -> None:
    """Refuse words of several lines: a batch file has one option a line, and would run what follows.

    Raises:
        UserError: there is one.
    """
    if word := next((one for one in words if set(one) & set("\r\n")), ""):
        raise UserError(f"--launcher-args {word!r}: a word of several lines; leave it out")


def _first_of(options: Mapping[str, str], words: Sequence[str]) -> str:
    """The first word that is one of the options, which launchers also take shortened."""
    for word in words:
        told = word.partition("=")[0].replace("_", "-")
        for name, short in options.items():
            is_long = len(told) > len("--") and told.startswith("--") and name.startswith(told)
            if is_long or (short and word.startswith(short)):
                return word
    return ""
