"""`python -m distbench.worker.child VERB [ARGUMENT...]`: answers a question that only torch can answer; starts no rank.

The question is one JSON value on standard input (nothing for a verb that takes none), the answer one JSON value as the
last line of standard output: {"user_error": sentence} where there is none. `sweep` alone answers line by line.
"""

import contextlib
import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from distbench.spec import UserError

# Verb to the function that answers it: of the question and the arguments.
VERBS = {
    "case_ids": "child_answers.all_case_ids",
    "plan_paths": "child_answers.plan_paths",
    "plan_problems": "rehearsal.all_plan_problems",
    "recordings": "child_answers.all_recordings",
    "signatures": "child_answers.all_signatures",
    "torch_behaviour": "torch_checks.behaviour",
    "torch_checks": "torch_checks.checks",
    "trace_differences": "torch_checks.all_trace_differences",
}


def answer(verb: str, question: Any, arguments: Sequence[str] = ()) -> Any:
    """What one verb answers; nothing is printed on standard output meanwhile: scenarios print and torch warns."""
    torch.set_num_threads(1)
    module, _, function = VERBS[verb].partition(".")
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answering = getattr(importlib.import_module(f"distbench.worker.{module}"), function)
        try:
            return answering(question, *arguments)
        except UserError as error:
            return {"user_error": str(error)}


def main(verb: str, *arguments: str) -> None:
    """Answer the question on standard input."""
    if verb == "sweep":
        from distbench.worker.sweep_steps import answer_lines

        return answer_lines()
    text = sys.stdin.read()
    print(json.dumps(answer(verb, json.loads(text) if text else None, arguments)))
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
