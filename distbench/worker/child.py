"""`python -m distbench.worker.child VERB [ARGUMENT...]`: a process for queries that need torch but no ranks.

The query is one JSON value on standard input (empty for verbs without a query). The answer is one JSON value on the
last line of standard output, or {"user_error": sentence} after a failure. Only `sweep` has one answer per line.
"""

import gc
import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from distbench.spec import UserError

# Verb to the function that returns the answer from the query and the arguments.
VERBS = {
    "case_ids": "distbench.worker.child_verbs.all_case_ids",
    "device_name": "distbench.worker.child_verbs.device_name",
    "plan_paths": "distbench.worker.child_verbs.plan_paths",
    "plan_problems": "distbench.worker.plan_rehearsal.all_plan_problems",
    "recordings": "distbench.worker.child_verbs.all_recordings",
    "signatures": "distbench.worker.child_verbs.all_signatures",
    "torch_behaviour": "distbench.worker.torch_checks.behaviour",
    "torch_checks": "distbench.worker.torch_checks.checks",
}


def answer(verb: str, question: Any, arguments: Sequence[str] = ()) -> Any:
    """Return the answer of one verb."""
    module, _, function = VERBS[verb].rpartition(".")
    try:
        verb_function = getattr(importlib.import_module(module), function)
        gc.freeze()  # Each search of all imported objects for garbage would take 0.2 s.
        return verb_function(question, *arguments)
    except UserError as error:
        return {"user_error": str(error)}


def main(verb: str, *arguments: str) -> None:
    """Read the query on standard input, and print the answer."""
    # Standard output is only for answers. Output of scenarios, torch and C++ libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if verb == "sweep":
        from distbench.worker.child_verbs import answer_lines

        gc.freeze()
        results = answer_lines(*arguments)
    else:
        text = sys.stdin.read()
        results = iter([answer(verb, json.loads(text) if text else None, arguments)])
    for result in results:
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
