"""What all ranks of a launch would say alike, said by one of each host: eight times the same sentence hides it."""

import contextlib
import errno
import hashlib
import os
import socket
import time

from distbench.commands.say import say

# How long who said it stays, so that ranks that start or fail a little later find out.
STAYS_S = 1.0


def say_once(text: str) -> None:
    """Say it on standard error, unless another rank of this launch on this host has just said the same.

    Who says it holds a name, an abstract socket of Linux, which goes with the process; elsewhere every rank says it.
    """
    from distbench.launch.ranks import joined_ranks
    from distbench.spec import UserError

    try:
        joined = joined_ranks(os.environ)
    except UserError:
        joined = None
    if joined is None or joined.world_size == 1:
        return say(text, err=True)
    what = f"{joined.launch or joined.address} {text}"
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(f"\0distbench-{hashlib.sha256(what.encode()).hexdigest()[:32]}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            return say(text, err=True)
        say(text, err=True)
        # Whatever ends this process now, it has said what there is to say.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(STAYS_S)
    return None
