"""Stands in for torchrun where a test is about what ranks compute, not about how they are started.

`python forking.py NUM_RANKS [-m MODULE | FILE] ARGUMENT...`, where python is one that has torch imported
(fork_server.py), forks the ranks, where torchrun and each of its ranks import it anew: on two cores that is most of a
small launch. A rank that fails ends it.
"""

import os
import runpy
import signal
import socket
import sys
import traceback

from distbench.processes.supervisor import die_with_parent


def main(num_ranks: int, arguments: list[str]) -> int:
    die_with_parent()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {fork(rank, num_ranks, port, arguments) for rank in range(num_ranks)}
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            return 1
    return 0


def fork(rank: int, num_ranks: int, port: int, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    message = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in message.items()}, MASTER_ADDR="127.0.0.1")
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__")
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # At once, as the worker leaves: destructors of process groups may wait for ranks that are gone.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
