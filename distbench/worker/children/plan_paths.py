"""`python -m distbench.worker.children.plan_paths`: which paths torch's own planners take, for `distbench plan`.

It reads one JSON object from stdin: mesh_shape, shape, dtype, devices_per_host, pairs (of placements, as `S(0)R`) and
budget_s. Prints one as the last line: torch's version, why it makes no partial of a shard (null where it does), and for
each planner one answer a pair. An answer is {"path": torch's own notation} or {"error": why there is none}; null where
the time was up.
"""

import json
import random
import sys
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from distbench.planning import State, parse_state
from distbench.spec.planner_names import TORCH_PLANNERS
from distbench.worker.rank.dtypes import TORCH_DTYPES
from distbench.worker.torch_internals import (
    ZERO_FILLS,
    Unsupported,
    fake_mesh,
    lacks,
    path_between,
    planner,
    remembered_steps,
)

Answer = dict[str, str] | None


def paths(request: dict[str, Any]) -> dict[str, Any]:
    """Every pair's path by each planner; pairs are asked in random order, so that a timeout omits a random part."""
    shape, dtype = request["shape"], TORCH_DTYPES[request["dtype"]]
    pairs = [tuple(parse_state(text, len(shape)) for text in pair) for pair in request["pairs"]]
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    deadline = time.monotonic() + request["budget_s"]
    answers: dict[str, list[Answer]] = {}
    with fake_mesh(request["mesh_shape"], request["devices_per_host"]) as mesh:
        # The quick planner goes first, so that a slow one never takes its time.
        for name in TORCH_PLANNERS:
            answers[name] = [None] * len(pairs)
            with planner(name), remembered_steps():
                for number in order:
                    if time.monotonic() > deadline:
                        break
                    answers[name][number] = _answer(mesh, shape, dtype, *pairs[number])
    return {"torch": torch.__version__, "no_zero_fill": lacks(ZERO_FILLS), "paths": answers}


def _answer(mesh: DeviceMesh, shape: list[int], dtype: torch.dtype, source: State, target: State) -> Answer:
    try:
        return {"path": path_between(mesh, shape, dtype, source, target)}
    # Whatever torch raises for this pair it would raise in a training job too: that is the answer.
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, KeyError, IndexError) as error:
        return {"error": f"torch raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


if __name__ == "__main__":
    try:
        print(json.dumps(paths(json.load(sys.stdin))))
    except Unsupported as reason:
        print(json.dumps({"torch": torch.__version__, "unsupported": str(reason)}))
