"""The same question for several jobs, each in a process of its own that has torch imported and nothing else done.

Importing torch takes longer than most answers, and a second job in the same process would find what the first left
behind: DTensor keeps what it planned for a mesh and serves it to an equal mesh, whatever groups that one has.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from distbench.spec import Job, UserError
from distbench.worker.rank.failure import one_line
from distbench.worker.torch_internals import Unsupported

Answer = dict[str, Any]


def answers_of(function: Callable[[Job], Answer], jobs: Sequence[Job], num_at_once: int) -> list[Answer]:
    """What the function answers for each job, in the jobs' order; where it raises, {"user_error": one sentence}.

    At most `num_at_once` processes run at the same time. This process must have done no work in torch before.
    """
    answers: list[Answer] = [{} for _ in jobs]
    waiting = list(enumerate(jobs))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < num_at_once:
            index, job = waiting.pop(0)
            connection, process = _started(function, job)
            running[connection] = index, process
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            index, process = running.pop(ready)
            answers[index] = _received(ready, process)
    return answers


def _started(function: Callable[[Job], Answer], job: Job) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_answer, args=(function, job, sender))
    process.start()
    # While this process holds the sending end too, a child that dies would never be noticed.
    sender.close()
    return receiver, process


def _received(connection: Connection, process: BaseProcess) -> Answer:
    with connection:
        try:
            answer: Answer = connection.recv()
            process.join()
        except EOFError:
            process.join()
            answer = {"user_error": f"its process ended with exit code {process.exitcode} and without an answer"}
    return answer


def _send_answer(function: Callable[[Job], Answer], job: Job, sender: Connection) -> None:
    try:
        answer = function(job)
    except (UserError, Unsupported) as error:
        answer = {"user_error": str(error)}
    except (Exception, SystemExit) as error:
        reason = f"it raises {one_line(error)}, on a fake process group; see whether distbench run runs it"
        answer = {"user_error": reason}
    sender.send(answer)
