"""`distbench run`: a request to jobs, and each job to its run file."""

import sys
from pathlib import Path
from typing import Any

import click

from distbench.commands import STARTED_AT
from distbench.commands.finite import MONTH_S, FiniteRange
from distbench.commands.say import say
from distbench.runs.record_checks import MAX_PASSES
from distbench.spec.devices import DEVICE_HELP, DEVICES
from distbench.spec.job import CHECKS
from distbench.spec.printable import clean, cut

MAX_REASON = 300  # characters


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@click.option("--set", "choices", multiple=True, metavar="AXIS=VALUE", help="Pin an axis or parameter; A,B sweeps it.")
@click.option("--mesh", metavar="DIM=N,...", help="Mesh, e.g. dp_shard=2,tp=2. Default: the scenario's own.")
@click.option("--device", type=click.Choice(tuple(DEVICES)), help=DEVICE_HELP)
@click.option("--quick", is_flag=True, help="Quick sizes and few samples: a look, not a measurement to keep.")
@click.option(
    "--pipelined", type=click.IntRange(1, 1_000_000), default=1, metavar="N", help="Time N iterations back to back."
)
@click.option(
    "--passes",
    type=click.IntRange(0, MAX_PASSES - 1),
    default=0,
    metavar="N",
    help="Take turns N times. [0: as it needs]",
)
@click.option(
    "--budget",
    "budget_s",
    type=FiniteRange(0.1, MONTH_S),
    metavar="S",
    help="Timed seconds all cases share. [180; quick: 5]",
)
@click.option("--check", type=click.Choice(CHECKS), default="full", help="What of steps is compared with one device.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(1, MONTH_S),
    default=300.0,
    metavar="S",
    help="Give up after S s of no progress.",
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder for the ranks' logs.")
@click.option("--profile", type=click.Path(path_type=Path), metavar="FILE", help="Plan and predict by this profile.")
@click.option("--trace-paths", is_flag=True, help="Trace each step's collectives after it was timed.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run(scenarios: tuple[str, ...], mesh: str | None, quiet: bool, **asked: Any) -> None:
    """Measure scenarios: one torchrun launch each, all cases of all their variants.

    A SCENARIO is a name (`distbench list`), path/to/file.py, or path/to/file.py::name. Under torchrun or srun, this
    process joins as a rank instead of starting any.

    \b
    Examples:
      distbench run llama_2d --quick
      distbench run cp_attention --set rotate=alltoall --mesh cp=4
      distbench run redistribute --profile profile.json --set planners=greedy+calibrated+direct
      torchrun --nnodes 2 --nproc-per-node 8 ... -m distbench run llama_2d --mesh dp_shard=4,tp=4
    """
    import os

    from distbench.launch import Request, jobs_of
    from distbench.launch.ranks import joined_ranks
    from distbench.spec import parse_mesh

    joined = joined_ranks(os.environ)
    parsed = parse_mesh(mesh) if mesh is not None else None
    request = Request(targets=scenarios, mesh=parsed, started_at=STARTED_AT, **asked)
    is_first = joined is None or joined.rank == 0
    jobs = jobs_of(request, joined)
    for job in jobs:
        if job.note and is_first:
            say(f"{job.scenario}: {job.note}", err=True)
    sys.exit(run_all(jobs, joined, quiet or not is_first))


def run_all(jobs: list[Any], joined: Any, silent: bool) -> int:
    """Launch jobs one after the other; the worst exit code. A mistake of the user's or Ctrl-C ends it."""
    from distbench.launch import launch
    from distbench.launch.display import display_for

    exit_codes = []
    for job in jobs:
        with display_for(job.scenario, silent) as display:
            outcome = launch(job, joined, display)
        if message := outcome.message or (_why_not_ok(Path(job.run_file)) if outcome.exit_code else ""):
            say(f"distbench: {job.scenario}: {cut(message)}", err=True)
        if not silent and Path(job.run_file).exists():
            counts = ", ".join(f"{count} {status}" for status, count in sorted(outcome.num_by_status.items()))
            say(f"{job.scenario}: {counts or 'no case finished'} -> {_relative(job.run_file)}", err=True)
            if job.trace_paths:
                say(f"{job.scenario}: {_of_traces(Path(job.run_file))}", err=True)
        exit_codes.append(outcome.exit_code)
        if outcome.exit_code in (2, 130):
            break
    return max(exit_codes, default=0)


def _why_not_ok(run_file: Path) -> str:
    """The cases that are neither ok nor skipped, the first of them with its reason."""
    from distbench.runs.run_file import read_run

    bad = [case for case in read_run(run_file).cases if case["status"] not in ("ok", "skipped")]
    if not bad:
        return ""
    first = f"{bad[0]['case']['id']} is {bad[0]['status']} ({str(bad[0].get('error'))[:MAX_REASON]})"
    more = f"; {len(bad) - 1} more: see `distbench report {_relative(str(run_file))}`" if len(bad) > 1 else ""
    return clean(first) + more


def _of_traces(run_file: Path) -> str:
    """What came of --trace-paths, and how to look at it."""
    from distbench.runs.run_file import read_run

    found = read_run(run_file)
    if not any(record["case"]["kind"] == "step" for record in found.cases):
        return "--trace-paths has nothing to trace: no case of this scenario is a step"
    failed = [f"{trace['case_id']} was not traced: {trace['error']}" for trace in found.traces if "error" in trace]
    traced = [trace for trace in found.traces if "error" not in trace]
    if not traced:
        return "; ".join(["no step was traced", *failed])
    notes = [f"traced {len(traced)} -> distbench report --paths {_relative(str(run_file))}"]
    if ratios := [trace["overhead"]["ratio"] for trace in traced if trace["overhead"]["ratio"]]:
        notes.append(f"a traced step takes {max(ratios):.2f} times the CPU time of a bare one at most")
    # Forwarding groups have every time but the exposed one; a profiler may lack some, and says why.
    notes += {why for trace in traced if trace["method"] == "profiler" and (why := trace["exposed_reason"])}
    if num_differing := sum(bool(trace["agreement"]["differences"]) for trace in traced):
        notes.append(f"two methods saw different collectives in {num_differing} of them, see the report")
    return "; ".join([*notes, *failed])


def _relative(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
