"""A real Slurm of two nodes on this host: munged, one slurmctld, two slurmd under names of their own.

Source of the settings: slurm.conf(5), and Slurm's FAQ on several slurmd on a host (`NodeHostname`, a `Port` each,
`slurmd -N`). Accounting is off; processes are tracked by process group, so that no cgroup is needed.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
FOLDERS = ("/usr/sbin", "/usr/local/sbin")
NODES = ("node1", "node2")
START_S, END_S = 30, 10
# Seconds after which a node whose daemon is silent counts as lost; and between a job's SIGTERM and its SIGKILL.
NODE_LOST_S, KILL_WAIT_S = 10, 10


def why_not() -> str:
    """Why no cluster can be made here; "" where it can."""
    if missing := [name for name in PROGRAMS if not _program(name)]:
        return f"needs {missing[0]} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "needs root, as whom these daemons run here"


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(FOLDERS))


def _runs(*command: str) -> bool:
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


class SlurmCluster:
    """The daemons.

    Args:
        folder: for their files; its path is short, since a socket lies in it.
        cpus: of each node.
    """

    def __init__(self, folder: Path, cpus: int = 4) -> None:
        self.folder, self._daemons = folder, dict[str, subprocess.Popen[bytes]]()
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=500"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": ports[0],
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthInfo": f"socket={folder}/munge/socket",
            "StateSaveLocation": f"{folder}/state",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
            "SlurmdSpoolDir": f"{folder}/spool-%n",
            "SlurmctldLogFile": f"{folder}/slurmctld.log",
            "SlurmdLogFile": f"{folder}/slurmd-%n.log",
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "ReturnToService": 2,
            "SlurmdTimeout": NODE_LOST_S,
            "KillWait": KILL_WAIT_S,
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        partition = f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
        # Nodes of a real cluster do not share every disk: this folder each node has empty and for itself.
        self.private = folder / "private"
        for name in ("munge", "state", "private"):
            (folder / name).mkdir(mode=0o700)
        self.has_private = _runs("unshare", "--mount", "true")
        (folder / "slurm.conf").write_text("\n".join([*lines, *nodes, partition, ""]))
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def start(self) -> None:
        """Start all daemons, and wait for both nodes.

        Raises:
            TimeoutError: they are not there after START_S seconds.
        """
        munge = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items()))
        self._await("munge's socket", lambda: (munge / "socket").exists())
        self._start("slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        self.await_nodes()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        words = [str(_program("slurmd")), "-D", "-N", name]
        if self.has_private:
            alone = f'mount -t tmpfs none "{self.private}" && exec "$@"'
            words = ["unshare", "--mount", "sh", "-c", alone, "sh", *words]
        self._start(*words, key=name)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon, as a node does that dies."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def await_nodes(self) -> None:
        """Wait until both nodes are free."""
        self._await("idle nodes", lambda: self.ask("sinfo", "-h", "-o", "%T %D").strip() == f"idle {len(NODES)}")

    def ask(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(
            command, env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def stop(self) -> None:
        """End the daemons, the last first, and what they started."""
        for process in reversed(self._daemons.values()):
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Processes of this host that were started with this cluster's settings: jobs, and who watches them."""
        result, settings = [], f"SLURM_CONF={self.variables['SLURM_CONF']}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if settings in path.read_bytes().split(b"\0"):
                    result.append(int(path.parent.name))
        return result

    def _start(self, program: str, *options: str, key: str = "") -> None:
        with (self.folder / f"{key or program}.out").open("wb") as output:
            self._daemons[key or program] = subprocess.Popen(
                [str(_program(program)), *options],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError(f"no {what} within {START_S} s; see {self.folder}")
            time.sleep(0.1)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster that ends with the block."""
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
