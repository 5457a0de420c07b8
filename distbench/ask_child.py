"""A question that only torch can answer: a child process is asked, and the last line that it prints is its answer."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from distbench.spec.errors import UserError


def ask_child(
    module: str, arguments: Sequence[str] = (), *, given: Any = None, timeout_s: float, failure: str = "{why}"
) -> Any:
    """What `python -m MODULE ARGUMENTS` answers, read from JSON.

    Args:
        given: plain data that it reads as JSON from its standard input; None for an empty one.
        timeout_s: seconds after which it is ended and given up.
        failure: what to say where there is no answer; `{why}` in it stands for the reason.

    Raises:
        UserError: it failed, did not end in time or printed no JSON; or it answers {"user_error": sentence}.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input="" if given is None else json.dumps(given),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(failure.replace("{why}", f"it did not end within {timeout_s:g} s")) from error
    try:
        if done.returncode:
            raise ValueError("a child that failed has no answer, whatever it printed")
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise UserError(failure.replace("{why}", _why(done))) from error
    if isinstance(answer, dict) and "user_error" in answer:
        raise UserError(answer["user_error"])
    return answer


def _why(done: "subprocess.CompletedProcess[str]") -> str:
    if done.returncode < 0:
        return f"it was ended by {signal.Signals(-done.returncode).name}"
    return (done.stderr.strip().splitlines() or ["it printed no answer"])[-1]
