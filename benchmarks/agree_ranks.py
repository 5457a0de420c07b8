"""What bench_check_agrees asks: of each plan what `check` says (`checked`, one process), and what ranks do (`ran`)."""

import datetime
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.agree_models import models
from benchmarks.agree_plans import Mesh, plans
from benchmarks.bench_models import EXAMPLES, FILES
from distbench.cases.step_correctness import StepCheck
from distbench.launch import Request, jobs_of
from distbench.plans.training_step import step_of
from distbench.ranks.context import RankContext
from distbench.ranks.device import calm_scheduler
from distbench.ranks.failure import one_line
from distbench.ranks.measure import no_stamp
from distbench.spec import Scenario, UserError, list_entries
from distbench.torch_private import Skipped, fake_ranks
from distbench.worker.plan_rehearsal import answer_of
from distbench.worker.rank_session import declared, load_scenario, variant_label

RANKS = 4
# Sizes of real models, what has no plan, and a compiler that takes longer than all the rest.
LEFT_OUT = {"real-size", "laboratory", "calibrate", "links"}
TIMEOUT = datetime.timedelta(seconds=30)


def subjects() -> Iterator[tuple[str, Mesh, Scenario]]:
    """(name, mesh, scenario): every variant of the shipped scenarios that has a step, and of the examples of the docs,
    where what they need is installed; then plans, and models, of others."""
    names = [entry.name for entry in list_entries() if not LEFT_OUT & set(entry.tags)]
    names += [str(EXAMPLES / name) for name, package in FILES.items() if importlib.util.find_spec(package)]
    for job in jobs_of(Request(tuple(names), device="cpu", quick=True), None):
        if math.prod(job.mesh.values()) != RANKS:
            continue
        function = load_scenario(Path(job.file), job.scenario)
        for variant in job.variants:
            scenario = declared(function, variant)
            if scenario.build_model is not None and variant.get("compile_backend") != "inductor":
                yield variant_label(job, variant), dict(job.mesh), scenario
    yield from plans()
    yield from models()


def checked() -> Iterator[dict[str, Any]]:
    """What `check` says of each: "passes", "refuses" or "skips", and why."""
    for name, sizes, scenario in subjects():
        with fake_ranks(sizes) as mesh:
            group: Any = dist.group.WORLD
            context = RankContext(0, torch.device("cpu"), mesh, "gloo", group, seed=1)
            try:
                answer = answer_of(scenario, context)
            except UserError as error:
                answer = {"problems": [str(error)]}
        message = "refuses" if answer["problems"] else "skips" if "skipped" in answer else "passes"
        yield {"name": name, "said": message, "why": "; ".join(answer["problems"])}


def ran() -> Iterator[dict[str, Any]]:
    """What a step of each does on ranks, nothing having been checked before: "runs", "wrong", "raises" or "skips"."""
    meshes: dict[tuple[tuple[str, int], ...], Any] = {}
    # Of its own, and more patient: where a plan raises on some ranks, the others come when their wait has ended.
    control: Any = dist.new_group(timeout=10 * TIMEOUT)
    for name, sizes, scenario in subjects():
        key = tuple(sizes.items())
        if key not in meshes:
            meshes[key] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        context = RankContext(dist.get_rank(), torch.device("cpu"), meshes[key], "gloo", control, seed=1)
        did, why = _did(scenario, context)
        message = context.gather((did, why))
        if any(state == "raises" for state, _ in message):
            del meshes[key]  # its groups may hold half of a collective
        worst = next((one for state in ("raises", "wrong", "skips") for one in message if one[0] == state), message[0])
        yield {"name": name, "did": worst[0], "why": worst[1]}


def _did(scenario: Scenario, context: RankContext) -> tuple[str, str]:
    try:
        step = step_of(scenario, context)
        step(no_stamp)
        wrong = StepCheck(step, scenario, context)()
    except Skipped as reason:
        return "skips", str(reason)
    except Exception as error:
        return "raises", one_line(error)
    return ("wrong", wrong) if wrong else ("runs", "")


def main(what: str, out: Path) -> None:
    """Write the rows as JSON."""
    torch.set_num_threads(1)
    if what == "checked":
        out.write_text(json.dumps(list(checked())))
        return
    calm_scheduler("cpu")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rows = list(ran())
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
