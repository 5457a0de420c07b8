"""The client of fork_server.py: to whoever starts it, it is a Python that has torch imported already.

It hands its arguments, folder, environment and standard streams to the server, and ends as the process ends that the
server forks for it: with its exit code, or by the signal that ended it. When this one is killed, so is that one.
"""

import json
import os
import resource
import signal
import socket
import sys


def main(address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = {
        "executable": os.path.abspath(sys.argv[0]),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"!"], [0, 1, 2])
        with server.makefile("rw", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            message = stream.readline()
    exit_code = int(message) if message else -signal.SIGKILL
    if exit_code >= 0:
        os._exit(exit_code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -exit_code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-exit_code, signal.SIG_DFL)
    os.kill(os.getpid(), -exit_code)
