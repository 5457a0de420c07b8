"""One `distbench run` on many nodes: by torchrun, started once on each node, or by TorchX."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.launch.rendezvous import expand_hosts, require_host, require_own, why_no_answer
from distbench.processes import start_supervised, stop_supervised
from distbench.spec import UserError
from distbench.spec.file_io import read_text
from distbench.spec.printable_text import cut, listed

END_TIMEOUT_S = 15.0  # time in which ranks complete their run files
# Options that --nodes and --ranks-per-node replace: long name to short name.
COUNTS = {
    "torchrun": {"--nnodes": "", "--nproc-per-node": "", "--standalone": ""},
    "slurm": {"--nodes": "-N", "--ntasks": "-n", "--ntasks-per-node": ""},
    "torchx": {"--j": "-j"},
}
OWN_COUNTS = "--nodes and --ranks-per-node set the number of nodes and ranks; leave out this option"
PORT, MAX_NAMED = 29500, 4
# torchrun determines this node's rank from one of these options.
_NODE_OPTIONS = ("node-rank", "rdzv-endpoint")
# Seconds after which a waiting node prints a line, because torchrun waits for minutes without output.
NOTICE_AFTER_S, POLL_S = 20.0, 0.5
# The first line of Python's traceback; in a rank's traceback the rank's name precedes it.
_TRACEBACK = "Traceback (most recent call last):"
_READ_S = 5.0


@dataclass(frozen=True)
class NodeLaunch:
    """A command to launch, and the number of nodes.

    Args:
        arguments: the arguments of `distbench run`, without the options of nodes.
        num_nodes, ranks_per_node: both at least 1; their product is the size of the mesh.
        device: type of device; each rank uses one device.
        out: results folder, which all nodes share.
        name: the job's name, from its scenarios.
        extra: further arguments for the launcher.
        timeout_s: seconds without progress after which ranks are ended.
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
        """The command of each rank: `distbench run` in this Python."""
        return [sys.executable, "-m", "distbench", "run", *self.arguments]


def launcher_here() -> str:
    """Return "slurm" if Slurm's commands are installed, else "torchrun"."""
    return "slurm" if shutil.which("sbatch") else "torchrun"


def hosts_of(text: str) -> list[str]:
    """Return the hosts of --hosts: a list, or a file with one host (`host`, `host slots=8`, `host:8`) per line.

    Raises:
        UserError: the file cannot be read, or the list is not valid.
    """
    where = "--hosts"
    is_file = "/" in text
    with contextlib.suppress(OSError):  # too long for a path
        is_file = is_file or Path(text).is_file()
    if is_file:
        lines = [line.partition("#")[0].split() for line in read_text(Path(text), "host list").splitlines()]
        where, text = f"host list {text}", ",".join(re.sub(r":\d+$", "", words[0]) for words in lines if words)
    try:
        return expand_hosts(text)
    except ValueError as error:
        raise UserError(
            f"{where} cannot be used: {error}; give node1,node2, node[1-4], or a file with hosts"
        ) from error


def host_words(hosts: Sequence[str], launcher: str, extra: Sequence[str]) -> tuple[str, ...]:
    """Return the launcher's arguments for these hosts, in addition to `extra`.

    Raises:
        UserError: this allocation of Slurm does not include all hosts, or for torchrun, the hosts do not include this
            host.
    """
    if launcher == "slurm":
        allocated = allocated_hosts(os.environ)
        if others := [host for host in hosts if allocated and host not in allocated]:
            problem = f"--hosts has {listed(others, MAX_NAMED)}, but Slurm job {os.environ.get('SLURM_JOB_ID')} has"
            raise UserError(f"{problem} {listed(allocated, MAX_NAMED)}; give hosts of this job")
        return (f"--nodelist={','.join(hosts)}",)
    if launcher != "torchrun":
        raise UserError(f"--hosts does not work with --launcher {launcher}; give --nodes {len(hosts)}")
    if len(hosts) == 1 or any(name in _options(extra) for name in _NODE_OPTIONS):
        return ()
    here = os.uname().nodename
    names = [here, here.partition(".")[0]]
    rank = next((at for at, host in enumerate(hosts) if host in names or host.partition(".")[0] == here), None)
    if rank is None:
        problem = f"--hosts has {listed(hosts, MAX_NAMED)}, but this host is {here}"
        raise UserError(f"{problem}; start the same command on each of these hosts, or give a list with {here}")
    address = () if address_in(extra) else ("--master-addr", hosts[0])
    return ("--node-rank", str(rank), *address)


def allocated_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this shell's allocation by Slurm; nothing outside of an allocation."""
    try:
        return expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return []


def require_program(name: str, launcher: str, advice: str, path: str | None = None) -> None:
    """Raise UserError if a launcher's program is not on `path`, by default this process's."""
    if not shutil.which(name, path=path):
        others = ", ".join(candidate for candidate in COUNTS if candidate != launcher)
        problem = f"--launcher {launcher} needs the program {name}, which is not installed on this host"
        raise UserError(f"{problem}; {advice}, or use {others}")


def refuse_words(options: Mapping[str, str], words: Sequence[str], why: str) -> None:
    """Reject words of --launcher-args that are one of `options`, also in shortened form.

    Args:
        options: long name to short name, empty for none.
        why: the end of the error message.

    Raises:
        UserError: one of the words is such an option.
    """
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        for name, short in options.items():
            is_long = len(option) > len("--") and option.startswith("--") and name.startswith(option)
            if is_long or (short and word.startswith(short)):
                raise UserError(f"--launcher-args {word}: {why}")


def run_here(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    watch: Callable[["subprocess.Popen[bytes]"], None] | None = None,
    stderr: int | None = None,
) -> int:
    """Run a launcher to its end, with this process's streams; return its exit code, 130 after Ctrl-C.

    The launcher's processes end with the launcher, and the launcher ends with this process.

    Args:
        command, environment: command and environment variables of the launcher's process.
        watch: called with the launcher's process, on a separate thread.
        stderr: subprocess.PIPE if `watch` reads the launcher's standard error; None for this process's standard error.

    Raises:
        UserError: the launcher cannot be started.
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


# torchrun.


def _torchrun_words(launch: NodeLaunch, where: Sequence[str]) -> list[str]:
    """torchrun's command for one node; `where` contains the options for the node's rank and the rendezvous address."""
    counts = [f"--nnodes={launch.num_nodes}", f"--nproc-per-node={launch.ranks_per_node}"]
    return [launch.command[0], "-m", "torch.distributed.run", *counts, *where, *launch.command[1:]]


def torchrun_lines(launch: NodeLaunch) -> str:
    """Return the command of each node for a shell; replace HOST by the first node's name or address."""
    if launch.extra:
        return shlex.join(_torchrun_words(launch, launch.extra))
    lines = ["HOST=first-node"]
    for rank in range(launch.num_nodes):
        where = (f"--node-rank={rank}", "--master-addr=$HOST", f"--master-port={PORT}")
        command = shlex.join(_torchrun_words(launch, where)).replace("'--master-addr=$HOST'", "--master-addr=$HOST")
        lines += [f"# node {rank}", command]
    return "\n".join(lines)


def run_by_torchrun(launch: NodeLaunch, say: Callable[[str], None]) -> int:
    """Run torchrun on this node; return its exit code.

    Raises:
        UserError: with several nodes, this node's rank or the rendezvous address is missing or not valid.
    """
    refuse_words(COUNTS["torchrun"], launch.extra, OWN_COUNTS)
    options, address, num_nodes = _options(launch.extra), address_in(launch.extra), launch.num_nodes
    rank = options.get("node-rank")
    if rank is not None and not (rank.isascii() and rank.isdecimal() and int(rank) < num_nodes):
        raise UserError(
            f"--node-rank {rank} is not valid for {num_nodes} nodes; "
            f"give each node a different rank, 0 to {num_nodes - 1}"
        )
    if num_nodes > 1 and not options.keys() & set(_NODE_OPTIONS):
        example = "--launcher-args '--node-rank 0 --master-addr HOST --master-port 29500'"
        problem = f"torchrun on {num_nodes} nodes needs this node's rank"
        raise UserError(f"{problem}; start the command on each node with {example} and the node's rank")
    if num_nodes > 1 and not address:
        problem = f"torchrun on {num_nodes} nodes needs the address of node 0"
        raise UserError(f"{problem}; add --master-addr HOST to --launcher-args, with node 0 as HOST")
    require_host(address.rpartition(":")[0])
    if address and "rdzv-endpoint" not in options and options.get("node-rank", "0") == "0":
        require_own(address)
    where = launch.extra or (("--standalone",) if num_nodes == 1 else ())
    watch = _Watch(address, launch, say)
    code = run_here(_torchrun_words(launch, where), watch=watch.follow if address else None)
    if watch.given_up:
        raise UserError(watch.given_up)
    return code


class _Watch:
    """Watch of a node that waits for the other nodes: report a long wait, and end torchrun after the timeout."""

    def __init__(self, address: str, launch: NodeLaunch, say: Callable[[str], None]) -> None:
        self.given_up = ""
        self._address, self._launch, self._say = address, launch, say

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Watch torchrun until it ends or starts ranks, which report their own waiting."""
        began, is_shown = time.monotonic(), False
        while process.poll() is None and not _has_children(process.pid):
            waited_s = time.monotonic() - began
            if waited_s >= NOTICE_AFTER_S and not is_shown:
                is_shown = True
                self._say(f"distbench: {self._why(waited_s)}")
            if waited_s >= self._launch.timeout_s:
                self.given_up = self._why(waited_s)
                process.kill()  # torchrun has no ranks yet, and at other signals prints a traceback
                return
            time.sleep(POLL_S)

    def _why(self, waited_s: float) -> str:
        waited = f"torchrun has waited {waited_s:.0f} s"
        if why := why_no_answer(self._address):
            advice = "give the first node as --master-addr, and open its port to the other nodes"
            return f"{waited} on this node, and {self._address} does not respond ({why}); {advice}"
        meeting = f"{self._launch.num_nodes} nodes at {self._address}, which responds"
        return f"{waited} on this node for {meeting}; start the command on each node"


def _has_children(pid: int) -> bool:
    """Whether a process has children; True if the system does not list children."""
    children = []
    with contextlib.suppress(OSError):
        children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return any(children) or not children


def address_in(words: Sequence[str]) -> str:
    """Return the `HOST:PORT` of torchrun's rendezvous from torchrun's arguments; "" without an address."""
    options = _options(words)
    host, port = options.get("master-addr", ""), options.get("master-port", "")
    if endpoint := options.get("rdzv-endpoint"):
        has_port = ":" in endpoint and not endpoint.endswith("]")
        host, _, port = endpoint.rpartition(":") if has_port else (endpoint, "", "")
    return f"{host.strip('[]')}:{port if port.isdecimal() else PORT}" if host else ""


def _options(words: Sequence[str]) -> dict[str, str]:
    """Values of torchrun's options by name. Names in arguments have hyphens or underscores; variables are PET_NODE_RANK
    etc."""
    options = {}
    for name in (*_NODE_OPTIONS, "master-addr", "master-port"):
        if value := os.environ.get(f"PET_{name.replace('-', '_').upper()}"):
            options[name] = value
    for word, after in itertools.pairwise([*words, ""]):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name.lstrip("-").replace("_", "-")] = value or after
    return options


# TorchX submits to Kubernetes, AWS Batch, Docker and others; its component dist.ddp runs torchrun on each node.


def torchx_words(launch: NodeLaunch) -> list[str]:
    """Return `torchx run ...`. Words of --launcher-args before `--` are for `torchx run`, words after `--` for
    dist.ddp.

    Source: TorchX 0.7, `torchx run --help` and the component dist.ddp.
    """
    words = list(launch.extra)
    at = words.index("--") if "--" in words else len(words)
    of_run, of_component = words[:at], words[at + 1 :]
    counts = ["-j", f"{launch.num_nodes}x{launch.ranks_per_node}", "--name", launch.name]
    if launch.device != "cpu" and "--gpu" not in of_component:
        counts += ["--gpu", str(launch.ranks_per_node)]
    _python, _m, module, *arguments = launch.command
    component = ["dist.ddp", *counts, *of_component, "-m", module, "--", *arguments]
    return ["torchx", "run", "--wait", "--log", *of_run, *component]


def torchx_line(launch: NodeLaunch) -> str:
    """Return the torchx command, quoted for a shell."""
    return shlex.join(torchx_words(launch))


def run_by_torchx(launch: NodeLaunch, say: Callable[[str], None]) -> int:
    """Submit the job and follow its log to the end; return torchx's exit code.

    A scheduler on this host finds torchrun next to this Python, even if the shell's path does not include it.

    Raises:
        UserError: torchx is not installed.
    """
    refuse_words(COUNTS["torchx"], launch.extra, OWN_COUNTS)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    require_program("torchx", "torchx", "install torchx (pip install 'distbench[torchx]')", path)
    complaint = _Complaint(say)
    code = run_here(torchx_words(launch), {**os.environ, "PATH": path}, complaint.follow, stderr=subprocess.PIPE)
    complaint.is_read.wait(_READ_S)
    if complaint.last:
        other = "choose another scheduler by --launcher-args '--scheduler NAME'"
        say(f"distbench: torchx failed ({cut(complaint.last)}); {other}, or see --dry-run for the command")
    elif code:
        say(f"torchx ended with exit code {code}; finished cases are in {launch.out}, if the job shares this folder")
    return code


class _Complaint:
    """Display of torchx's standard error without tracebacks; `last` is the last line of the traceback."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.last, self.is_read = "", threading.Event()
        self._say = say

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Print standard error to its end, without tracebacks."""
        assert process.stderr is not None
        is_traceback = False
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            is_traceback = is_traceback or line == _TRACEBACK
            if not is_traceback:
                self._say(line)
            elif line and not line.startswith((" ", _TRACEBACK)):
                self.last = line
        self.is_read.set()
