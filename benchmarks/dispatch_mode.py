"""`python -m benchmarks.dispatch_mode JOBS.json`: collectives of each step by two methods, on a fake process group.

The second method, torch's dispatch mode, is independent of the kernels of `torch_private/collectives.py`. Nothing else
uses it, since it passes every operator through Python and does not see other threads.
"""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from distbench.cases.step import step_cases
from distbench.observe import module_attribution
from distbench.observe.module_attribution import Communication, communications_of
from distbench.observe.trace import StepTrace
from distbench.ranks.context import RankContext
from distbench.spec import Job
from distbench.torch_private import NAMESPACES, CollectiveCall, Skipped, call_of, each_operator, fake_ranks
from distbench.torch_private.probe import replaced
from distbench.worker.plan_rehearsal import rank_of
from distbench.worker.rank_session import declared, load_scenario, variant_label


@contextlib.contextmanager
def dispatched_collectives(on_issue: Callable[[CollectiveCall], None]) -> Iterator[None]:
    """Call `on_issue` just before each collective of this thread (and of the backward that it runs) is dispatched."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in NAMESPACES and (call := call_of(func, args, kwargs)) is not None:
            on_issue(call)
        return func(*args, **kwargs)

    with each_operator(handle):
        yield


# Functions that observe by the product's method do so by this one instead.
by_dispatch_mode = partial(replaced, module_attribution, "issued_collectives", dispatched_collectives)


def rows_by_both(trace: StepTrace) -> tuple[list[Communication], list[Communication]]:
    """Return a step's collectives as the trace has them, and by the dispatch mode."""
    [traced] = trace.timed(1)
    # From the same values: values determine the experts of tokens.
    trace._restart()
    step = trace.step
    with by_dispatch_mode():
        dispatched = communications_of(step, step.phases, step.plan, trace.context, step.model)
    return [row.what for row in traced.rows], dispatched


def differences(rows: Sequence[Communication], dispatched: Sequence[Communication]) -> list[str]:
    """Return one sentence for the first place where they differ in anything but the operator's name; [] if nowhere."""
    ours, theirs = ([{**asdict(row), "op": ""} for row in each] for each in (rows, dispatched))
    place = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    if ours == theirs:
        return []
    texts = [str(each[place]) if place < len(each) else "nothing" for each in (ours, theirs)]
    return [f"collective {place}: {texts[0]} in the trace, {texts[1]} by the dispatch mode"]


def _of_job(job: Job, context: RankContext) -> Iterator[tuple[str, dict[str, Any]]]:
    function = load_scenario(Path(job.file), job.scenario)
    for variant in job.variants:
        for case_spec in step_cases(declared(function, variant), variant_label(job, variant), context):
            try:
                with case_spec.open() as opened_case:
                    assert isinstance(opened_case.trace, StepTrace)
                    rows, dispatched = rows_by_both(opened_case.trace)
            except Skipped as reason:
                yield case_spec.case.id, {"skipped": str(reason)}
                continue
            yield (
                case_spec.case.id,
                {
                    "num_rows": len(rows),
                    "num_owned": sum(row.owner_known for row in rows),
                    "counts": Counter(f"{row.mesh_dim} {row.kind}" for row in rows),
                    "differences": differences(rows, dispatched),
                },
            )


def main(file: Path) -> None:
    """Print case id to the comparison of its step, as JSON."""
    jobs = [Job.from_record(record) for record in json.loads(file.read_text())]
    by_case: dict[str, dict[str, Any]] = {}
    # One mesh object for all jobs on equal meshes: otherwise they would share DTensor's caches with destroyed groups.
    for shape in dict.fromkeys(tuple(job.mesh.items()) for job in jobs):
        with contextlib.redirect_stdout(sys.stderr), fake_ranks(dict(shape)) as mesh:
            for job in (job for job in jobs if tuple(job.mesh.items()) == shape):
                by_case |= _of_job(job, rank_of(mesh, jobs[0].settings.seed))
    print(json.dumps(by_case))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
