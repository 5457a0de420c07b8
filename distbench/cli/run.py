"""`distbench run`: a request to jobs, each job to its run file, the first screen of the result, slow links refused."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from distbench.cli import STARTED_AT
from distbench.cli.main import say_once
from distbench.cli.on_nodes import WHERE_PARAMETERS, KeepsArguments, node_options, run_on_nodes
from distbench.cli.options import MONTH_S, FiniteRange, given, refuse_without, scenario_names, width_option
from distbench.cli.output import say, say_lines
from distbench.records.run_file_fields import MAX_PASSES
from distbench.spec import Job, format_mesh
from distbench.spec.devices import DEVICE_HELP, DEVICES
from distbench.spec.errors import PLAN_PROBLEMS, UserError
from distbench.spec.file_io import short_path
from distbench.spec.job import CHECKS
from distbench.spec.mesh import RANKS_PER_CPU, mesh_size
from distbench.spec.safe_text import clean, count_text, cut

# What `distbench run` says around a launch: a question before very many ranks, and the first screen of its results.


def confirm_ranks(jobs: Sequence[Job], yes: bool) -> None:
    """Ask before more than RANKS_PER_CPU ranks a CPU are started here; a UserError where there is nobody to ask.

    More of them measure little but each other, and a typing error in --mesh can bring a machine down.
    Without a known number of CPUs nothing is asked.
    """
    largest = max((job for job in jobs if job.device == "cpu"), key=lambda job: mesh_size(job.mesh), default=None)
    if yes or largest is None:
        return
    num_cpus, num_ranks = largest.environment.get("num_cpus"), mesh_size(largest.mesh)
    if not isinstance(num_cpus, int) or num_ranks <= RANKS_PER_CPU * num_cpus:
        return
    what = f"{largest.scenario} on {format_mesh(largest.mesh)} starts {num_ranks} ranks on {num_cpus} CPUs"
    if not is_terminal():
        limit = f"over {RANKS_PER_CPU} a CPU they measure waiting, and may exhaust this machine"
        raise UserError(f"{what}; {limit}; give a smaller --mesh, or --yes to start them all the same")
    if not click.confirm(f"{what}. Start them?", err=True):
        raise UserError("nothing was started; give a smaller --mesh")


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin is not None and sys.stderr is not None and sys.stdin.isatty() and sys.stderr.isatty()


def told(job: Job, message: str) -> str:
    """Why a launch failed; problems of a plan as `distbench check` tells them, which looks for a mesh that works."""
    if PLAN_PROBLEMS not in message:
        return message
    from distbench.cli.check import check_jobs
    from distbench.show.terminal import width_here, wrap

    try:
        found = check_jobs([job])
    except UserError:
        return message
    if not found.num_problems:
        return message
    lines = [line for text in found.lines for line in wrap(text, width_here(), "    ")]
    return "\n".join([f"{PLAN_PROBLEMS}, so nothing was measured", *lines])


def show_summary(jobs: Sequence[Job], is_resumed: bool = False) -> None:
    """The first screen on what was measured, if anything was; what was resumed is not the latest run, and so named."""
    run_files = [Path(job.run_file) for job in jobs if Path(job.run_file).exists()]
    if run_files:
        from distbench.report import summary_of

        out = run_files[0].parents[1]
        elsewhere = [] if out == Path("results").resolve() else ["--runs", str(short_path(out))]
        words = [str(short_path(path)) for path in run_files] if is_resumed else elsewhere
        if is_terminal():
            say("", err=True)  # what ranks did stands above
        say(summary_of(run_files, shlex.join(["distbench", "report", *words])))


# `distbench run --fail-on-outlier` and `--against`: what is refused before measuring, and what is said after it.

TAG = "links"
SLOW, UNKNOWN = 1, 3
ONLY_LINKS = "--fail-on-outlier and --against are for links, and none {}; run scenario links"


def require_links(targets: Sequence[str], asked: Mapping[str, Any]) -> int | None:
    """Refuse, before anything is measured, what cannot be held against anything.

    Args:
        targets: the scenarios as they were given.
        asked: the command's parameters.

    Returns:
        How many ranks the earlier run had, None where none is given.

    Raises:
        UserError: none of the scenarios, all of which are shipped, is of links; or the earlier run cannot be read, or
            measured none.
    """
    earlier: Path | None = asked["against"]
    if not (earlier or asked["fail_on_outlier"]):
        return None
    from distbench.judge.links import link_run_of
    from distbench.records.run_file import read_run
    from distbench.spec import find
    from distbench.spec.discovery import scenario_folder

    entries = [entry for target in targets for entry in find(target)]
    # What a file of the user's own measures is known once it runs.
    if entries and not any(TAG in one.tags or one.file.parent != scenario_folder() for one in entries):
        raise UserError(ONLY_LINKS.format("would be measured"))
    if earlier is None:
        return None
    links = link_run_of(read_run(earlier))
    if links is None:
        raise UserError(f"--against {earlier}: it measured no links; give a run file of scenario links")
    return len(links.hosts)


def require_as_many(num_ranks: int | None, jobs: Sequence[Job]) -> None:
    """Refuse an earlier run of another number of ranks.

    Args:
        num_ranks: what `require_links` returned.
        jobs: what will be measured.

    Raises:
        UserError: no job has as many.
    """
    sizes = sorted({mesh_size(job.mesh) for job in jobs})
    if num_ranks is not None and num_ranks not in sizes:
        what = f"--against: the earlier run has {count_text(num_ranks, 'rank')}, this one {', '.join(map(str, sizes))}"
        raise UserError(f"{what}; give a run with the same ranks on each host, or another --mesh")


def links_code(jobs: Sequence[Job], earlier: Path | None, silent: bool) -> int:
    """Print what is slow among the links, also since an earlier run where one is given; return the exit code.

    The codes are those of `gate --strict`: an unknown outcome is not a success.

    Args:
        jobs: what was measured.
        earlier: a run file.
        silent: whether the summary was not shown: then only what is slow is said, and where nothing could be told.

    Returns:
        SLOW where anything is slow, UNKNOWN where a rank or link of half the speed could have gone unnoticed, else 0.

    Raises:
        UserError: no links were measured, or the earlier run's are others.
    """
    from distbench.judge.links_text import judged, link_hosts_note, loss_lines
    from distbench.records.run_file import read_run

    runs = [run for job in jobs if Path(job.run_file).exists() for run in [read_run(Path(job.run_file))]]
    found = [(run, verdict) for run in runs if (verdict := judged(run))]
    if not found:
        raise UserError(ONLY_LINKS.format("were measured"))
    judgements = []
    before = read_run(earlier) if earlier else None
    for run, verdict in found:
        since = judged(run, before) if before else None
        for line in loss_lines(run) if silent else ():
            say(f"distbench: {run.scenario}: {line}", err=True)
        if before and since and not silent:
            lines = [*link_hosts_note(run, before), *since.lines]
            say("\n".join(f"since {before.path.name}: {line}" for line in lines))
        for one, prefix in ((verdict, ""), (since, f"since {before.path.name}: " if before else "")):
            if one and silent and (one.is_slow or not one.is_conclusive):
                say(f"distbench: {run.scenario}: {prefix}{one.lines[0]}", err=True)
            judgements += [one] if one else []
    if any(one.is_slow for one in judgements):
        return SLOW
    return 0 if all(one.is_conclusive for one in judgements) else UNKNOWN


INTERRUPTED = 130
OF_LINKS = ("fail_on_outlier", "against")
MAX_REASON = 300  # characters
# Parameters of the command that say nothing of what is measured.
NOT_OF_A_RUN = ("resume", "quiet", "scenarios", "yes", *OF_LINKS)
# In the context's meta, for who calls the command from Python: the run files, and why it ended with 2.
RUN_FILES, MESSAGE, REFUSED = f"{__name__}.run_files", f"{__name__}.message", f"{__name__}.refused"
MISSING = f"{__name__}.missing"


@click.command(cls=KeepsArguments)
@click.argument("scenarios", nargs=-1, metavar="SCENARIO...", shell_complete=scenario_names)
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
@click.option("-k", "chosen", default="", metavar="EXPR", help='Only these cases: -k "greedy and not f32".')
@click.option("--label", default="", metavar="TEXT", help="Remembered with the results; `report --label` finds it.")
@click.option("--dry-run", is_flag=True, help="Start nothing: list cases and time; with --nodes, the launch.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Go on with an interrupted run file.")
@click.option(
    "--fail-on-outlier",
    is_flag=True,
    help="End with 1 where a rank, host or link is slow, with 3 where that is unknown.",
)
@click.option("--against", type=click.Path(path_type=Path), metavar="RUN", help="Links: what is slower since that run.")
@click.option("--quiet", is_flag=True, help="Show no progress and no summary.")
@click.option("--yes", is_flag=True, help="Start more than 4 ranks a CPU without asking.")
@node_options
@width_option
def run(
    scenarios: tuple[str, ...],
    mesh: str | None,
    dry_run: bool,
    resume: Path | None,
    quiet: bool,
    yes: bool,
    **asked: Any,
) -> None:
    """Measure scenarios: all cases of all their variants. Those of one number of ranks share one launch.

    A SCENARIO is a name (`distbench list`), path/to/file.py, or path/to/file.py::name. Under torchrun or srun, this
    process joins as a rank instead of starting any.

    With --resume, everything else stands in the interrupted run file: the cases that it lacks are measured and added.

    \b
    Examples:
      distbench run llama_2d --quick
      distbench run cp_attention --set rotate=alltoall --mesh cp=4
      distbench run redistribute --profile profile.json --set planners=greedy+calibrated+direct
      distbench run fsdp_knobs -k "plain or hybrid" --dry-run
      distbench run --resume results/host-1a2b3c/20260101T120000Z-1a2b3c4d-llama_2d-0f.jsonl
      distbench run llama_2d --mesh dp_shard=4,tp=4 --nodes 2 --launcher slurm
    """
    import os

    from distbench.launch.rendezvous import joined_ranks, require_address
    from distbench.spec import parse_mesh

    joined = joined_ranks(os.environ)
    if joined:
        joined = require_address(joined)
    if resume:
        job = _resumed(resume, scenarios, joined)
        require_as_many(require_links([f"{job.file}::{job.scenario}"], asked), [job])
        _measure([job], joined, quiet, is_resumed=True)
    if not scenarios:
        raise UserError("run needs a SCENARIO; `distbench list` shows those that are shipped")
    parsed = parse_mesh(mesh) if mesh is not None else None
    where = {name: asked.pop(name) for name in WHERE_PARAMETERS}
    num_ranks_before = require_links(scenarios, asked)
    if where["nodes"] or where["launcher"]:
        sys.exit(run_on_nodes(scenarios, parsed, joined is not None, {**asked, **where, "dry_run": dry_run}))
    refuse_without("--nodes", *WHERE_PARAMETERS)
    jobs = _asked_jobs(scenarios, parsed, joined, asked)
    require_as_many(num_ranks_before, jobs)
    if dry_run:
        from distbench.cli.dry_run import lines_of

        if _is_first(joined):
            say_lines(lines_of(jobs, asked["out"]))
        return
    if joined is None:
        confirm_ranks(jobs, yes)
    _measure(jobs, joined, quiet or not _is_first(joined))


def _is_first(joined: Any) -> bool:
    """Whether this process speaks for all: one that started the ranks, or has joined as rank 0."""
    return joined is None or joined.rank == 0


def _asked_jobs(
    scenarios: tuple[str, ...], mesh: dict[str, int] | None, joined: Any, asked: dict[str, Any]
) -> list[Any]:
    """The jobs that the command line asks for; what is to be said of one is said."""
    from distbench.launch import Request, jobs_of

    asked = {name: value for name, value in asked.items() if name not in OF_LINKS}
    jobs = jobs_of(Request(targets=scenarios, mesh=mesh, started_at=STARTED_AT, **asked), joined)
    click.get_current_context().meta[RUN_FILES] = [job.run_file for job in jobs]
    for job in jobs:
        if job.note and _is_first(joined):
            say(f"{job.scenario}: {job.note}", err=True)
    return jobs


def _measure(jobs: list[Any], joined: Any, silent: bool, is_resumed: bool = False) -> NoReturn:
    """Launch the jobs, show what was found unless they were interrupted, and end with their exit code."""
    exit_code, asked = run_all(jobs, joined, silent), click.get_current_context().params
    if not silent and exit_code != INTERRUPTED:
        show_summary(jobs, is_resumed)
    if missing := click.get_current_context().meta.get(MISSING):
        say_once(f"distbench: error: {missing}")
    if exit_code == 0 and _is_first(joined) and (asked["fail_on_outlier"] or asked["against"]):
        slow = links_code(jobs, asked["against"], silent)
        exit_code = slow if asked["fail_on_outlier"] else 0
    sys.exit(exit_code)


def _resumed(file: Path, scenarios: tuple[str, ...], joined: Any) -> Any:
    """The job that is left of an interrupted run, which says all there is to say."""
    from distbench.launch.run_job import job_left_of

    others = [*scenarios, *(option for name, option in given().items() if name not in NOT_OF_A_RUN)]
    if others:
        raise UserError(f"--resume goes on as {file} was begun, so it takes no {others[0]}; leave it out")
    if joined:
        raise UserError("--resume starts ranks itself, so it cannot join another launcher's; start it without one")
    return job_left_of(file)


def run_all(jobs: list[Any], joined: Any, silent: bool) -> int:
    """Launch jobs one after the other; the worst exit code.

    A refused scenario does not keep the others from running. Ctrl-C, and storage that takes no more, end it.
    """
    from distbench.launch import MODULE, RankProcesses, launch_on
    from distbench.launch.display import display_for

    exit_codes, left_out, refused = [], [], []
    with RankProcesses(jobs, joined, MODULE) as ranks:
        for job in jobs:
            with display_for(job.scenario, silent) as display:
                outcome = launch_on(ranks, job, display)
            _say_what_became(job, outcome, silent)
            exit_codes.append(outcome.exit_code)
            left_out.append(outcome.none_chosen)
            if outcome.user_can_fix and not outcome.is_storage_full:
                refused.append(job.scenario)
            if outcome.exit_code == INTERRUPTED or outcome.is_storage_full:
                break
    if all(left_out):
        raise UserError(left_out[0])
    _note_missing(jobs, len(exit_codes), refused)
    return max(exit_codes, default=0)


def _note_missing(jobs: list[Any], num_run: int, refused: list[str]) -> None:
    """Name the scenarios of several that were not measured, in what the command says last."""
    not_run = [job.scenario for job in jobs[num_run:]]
    if len(jobs) == 1 or not (refused or not_run):
        return
    parts = (("refused", refused), ("not run", not_run))
    what = "; ".join(
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {how}" for how, names in parts if names
    )
    meta = click.get_current_context().meta
    meta[MISSING] = f"of {len(jobs)} scenarios, {what}"
    meta[MESSAGE] = f"{meta[MISSING]} ({meta[MESSAGE]})" if MESSAGE in meta else meta[MISSING]


def _say_what_became(job: Any, outcome: Any, silent: bool) -> None:
    if message := outcome.message or (_why_not_ok(Path(job.run_file)) if outcome.exit_code else ""):
        say_once(f"distbench: {job.scenario}: {cut(told(job, message))}")
        meta = click.get_current_context().meta
        # A refusal is what the command ends with, whatever comes after it.
        if outcome.user_can_fix or not meta.get(REFUSED):
            meta[MESSAGE], meta[REFUSED] = f"{job.scenario}: {cut(message)}", outcome.user_can_fix
    if outcome.warning:
        say_once(f"distbench: warning: {job.scenario}: {outcome.warning}")
    if outcome.none_chosen and not silent:
        say(f"{job.scenario}: no case matches -k", err=True)
    elif not silent and Path(job.run_file).exists():
        counts = ", ".join(f"{count} {status}" for status, count in sorted(outcome.num_by_status.items()))
        say(f"{job.scenario}: {counts or 'no case finished'} -> {short_path(Path(job.run_file))}", err=True)
        if job.trace_paths:
            say(f"{job.scenario}: {_of_traces(Path(job.run_file))}", err=True)


def _why_not_ok(run_file: Path) -> str:
    """The cases that are neither ok nor skipped, the first of them with its reason."""
    from distbench.records.run_file import read_run

    bad = [case for case in read_run(run_file).cases if case["status"] not in ("ok", "skipped")]
    if not bad:
        return ""
    first = f"{bad[0]['case']['id']} is {bad[0]['status']} ({str(bad[0].get('error'))[:MAX_REASON]})"
    more = f"; {len(bad) - 1} more: see `distbench report {short_path(run_file)}`" if len(bad) > 1 else ""
    return clean(first) + more


def _of_traces(run_file: Path) -> str:
    """What came of --trace-paths, and how to look at it."""
    from distbench.records.run_file import read_run

    found = read_run(run_file)
    if not any(record["case"]["kind"] == "step" for record in found.cases):
        return "--trace-paths has nothing to trace: no case of this scenario is a step"
    failed = [f"{trace['case_id']} was not traced: {trace['error']}" for trace in found.traces if "error" in trace]
    traced = [trace for trace in found.traces if "error" not in trace]
    if not traced:
        return "; ".join(["no step was traced", *failed])
    notes = [f"traced {len(traced)} -> distbench report --paths {short_path(run_file)}"]
    if ratios := [trace["overhead"]["ratio"] for trace in traced if trace["overhead"]["ratio"]]:
        notes.append(f"a traced step takes {max(ratios):.2f} times the CPU time of a bare one at most")
    # Forwarding groups have every time but the exposed one; a profiler may lack some, and says why.
    notes += {why for trace in traced if trace["method"] == "profiler" and (why := trace["exposed_reason"])}
    if num_differing := sum(bool(trace["agreement"]["differences"]) for trace in traced):
        notes.append(f"two methods saw different collectives in {num_differing} of them, see the report")
    return "; ".join([*notes, *failed])
