"""`distbench run`: jobs of scenarios, run files of jobs, and the summary."""

import contextlib
import datetime
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

import click

from distbench.cli import STARTED_AT
from distbench.cli.main import main, suite_of
from distbench.cli.on_nodes import KeepsArguments, NodeOptions, on_allocation, run_on_nodes
from distbench.cli.options import (
    PATH,
    Duration,
    cases_option,
    dry_run_option,
    format_option,
    given,
    label_option,
    make_folder,
    mesh_option,
    option,
    options_of,
    quick_option,
    quiet_option,
    refuse_without,
    results_option,
    say,
    say_lines,
    say_once,
    scenario_names,
    set_option,
    verbose_option,
    width_option,
    write,
)
from distbench.records.run_file import MAX_PASSES
from distbench.spec import Job, format_mesh
from distbench.spec.devices import DEVICE_HELP, DEVICES
from distbench.spec.errors import INTERRUPTED, PLAN_PROBLEMS, UserError
from distbench.spec.file_io import short_path
from distbench.spec.job import CHECKS
from distbench.spec.mesh import RANKS_PER_CPU, mesh_size
from distbench.spec.printable_text import clean, count_text, cut

if TYPE_CHECKING:
    from distbench.judge.preflight import ExpectedRates
    from distbench.launch import JobOutcome
    from distbench.launch.rendezvous import Joined
    from distbench.records.run_file import Run


LIST_TIMEOUT_S = 600.0
# Settings that an earlier run must share for the estimate of wall time.
DECIDE_TIME = ("budget_s", "max_case_s", "max_samples", "iterations_per_sample", "check")
MAX_REASON = 600  # characters: a wrong step has its likely cause and the fix at the end
ONLY_LINKS = "{} needs scenario links, which {}; add links to the scenarios"
# Parameters that do not change the measurement: --resume accepts them.
LINK_OPTIONS = ("fail_on_outlier", "against", "expect", "verdict_out")
BESIDE_RESUME = ("resume", "form", "quiet", "scenarios", "yes", *LINK_OPTIONS)


@dataclass(frozen=True)
class LinkOptions:
    """Options of scenario links: fail for a slow link, compare with an earlier run or with expected rates, write files
    of the verdict.
    """

    fail_on_outlier: bool = option(
        "--fail-on-outlier",
        default=False,
        is_flag=True,
        help="Exit with 1 if a rank, host or link is slow, with 3 if the verdict is unknown.",
    )
    against: Path | None = option(  # noqa: RUF009 - it makes a field
        "--against", type=PATH, metavar="SOURCE", help="Compare with these figures. An earlier run of links."
    )
    expect: str | None = option(
        "--expect", metavar="HARDWARE", help="Compare the links' rates with this hardware (h100, or a file)."
    )
    verdict_out: Path | None = option(  # noqa: RUF009 - it makes a field
        "--verdict-out",
        type=PATH,
        metavar="DIR",
        help="Write good_hosts, bad_hosts, preflight.json and preflight.prom into this folder.",
    )

    @property
    def given(self) -> str:
        """Return the name of the first given option, "" without options."""
        return next((f"--{name.replace('_', '-')}" for name in LINK_OPTIONS if getattr(self, name)), "")


@dataclass
class Ending:
    """The end of a command, for a caller in Python.

    Args:
        run_files: run files of the jobs.
        message: the reason for an exit code other than 0.
        is_refusal: whether the user can fix the problem in the message.
        missing: text about scenarios that were not measured.
    """

    run_files: list[str] = field(default_factory=list)
    message: str = ""
    is_refusal: bool = False
    missing: str = ""


# Options of every command that starts ranks.
device_option = click.option("--device", type=click.Choice(tuple(DEVICES)), help=DEVICE_HELP)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Duration(),
    default=300.0,
    metavar="TIME",
    help="Stop after this time without progress. [5m]",
)
yes_option = click.option(
    "--yes", is_flag=True, help="Continue without confirmation. More than 4 ranks per CPU need a confirmation."
)


class TakesSuites(KeepsArguments):
    """A command whose SCENARIO may be @NAME: the scenarios and options of [tool.distbench.suite.NAME]."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words with the suite's options as defaults, and replace @NAME by the suite's scenarios."""
        given_scenarios = self.make_parser(ctx).parse_args([*args])[0].get("scenarios")
        names = [word for word in given_scenarios if word.startswith("@")] if isinstance(given_scenarios, tuple) else []
        if len(names) > 1:
            raise UserError(f"{' and '.join(names)}: the options of a suite apply to the whole run; give one suite")
        suites = {name: suite_of(main, name.removeprefix("@")) for name in names}
        for suite in suites.values():
            ctx.default_map = {**(ctx.default_map or {}), **suite.options}
        rest = super().parse_args(ctx, args)
        targets = ctx.params.get("scenarios") or ()
        ctx.params["scenarios"] = tuple(
            scenario for target in targets for scenario in (suites[target].scenarios if target in suites else (target,))
        )
        return rest


@click.command(cls=TakesSuites)
@click.argument("scenarios", nargs=-1, metavar="SCENARIO...", shell_complete=scenario_names)
@set_option
@mesh_option("Default: the scenario's mesh.")
@device_option
@quick_option("Few samples are taken, enough for a first look but not for a baseline.")
@click.option(
    "--pipelined",
    type=click.IntRange(1, 1_000_000),
    default=1,
    metavar="N",
    help="Time N iterations back to back per sample.",
)
@click.option(
    "--passes",
    type=click.IntRange(0, MAX_PASSES - 1),
    default=0,
    metavar="N",
    help="Measure each case in N passes. [0: as many as the precision needs]",
)
@click.option(
    "--budget",
    "budget_s",
    type=Duration(least_s=0.1),
    metavar="TIME",
    help="Total measured time of all cases, such as 30s or 5m. [3m; quick: 5s]",
)
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="full",
    help="Extent of the comparison of step results with a single device.",
)
@results_option("")
@timeout_option
@click.option("--log-dir", type=PATH, help="Folder for the ranks' logs.")
@click.option("--profile", type=PATH, metavar="FILE", help="Cost profile. Plans and predictions depend on the profile.")
@click.option("--trace-paths", is_flag=True, help="Trace each step's collectives after its timing.")
@click.option("--show-paths", is_flag=True, hidden=True, help="End with report --paths, as distbench trace does.")
@cases_option
@label_option
@dry_run_option("List cases and time, or with --nodes the launch.")
@click.option("--resume", type=PATH, metavar="RUN", help="Continue this interrupted run.")
@options_of(LinkOptions, "links")
@format_option("table", "json")
@quiet_option
@yes_option
@options_of(NodeOptions, "where")
@verbose_option
@width_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    scenarios: tuple[str, ...],
    dry_run: bool,
    resume: Path | None,
    links: LinkOptions,
    form: str,
    quiet: bool,
    yes: bool,
    where: NodeOptions,
    show_paths: bool,
    **of_request: Any,
) -> None:
    """Measure scenarios: all cases of all their variants. Scenarios with the same number of ranks share one launch.

    A SCENARIO is a name (`distbench list`), path/to/file.py, path/to/file.py::name, or @NAME. @NAME means the scenarios
    and options of [tool.distbench.suite.NAME] in pyproject.toml. Under torchrun or srun, this process joins as a rank
    instead of starting ranks.

    --resume measures the missing cases of an interrupted run with the options of that run, and adds them to its file.

    \b
    Examples:
      distbench run llama_2d --quick
      distbench run cp_attention --set rotate=alltoall --mesh cp=4
      distbench run redistribute --profile p.json --set planners=greedy+direct
      distbench run fsdp_knobs -k "plain or hybrid" --dry-run
      distbench run --resume last
      distbench run llama_2d --mesh dp_shard=4,tp=4 --nodes 2 --launcher slurm
    """
    from distbench.launch import Request, jobs_of
    from distbench.launch.rendezvous import joined_ranks, require_address
    from distbench.records.results_folder import named_run

    joined = joined_ranks(os.environ)
    joined = require_address(joined) if joined else None
    if links.against:
        links = replace(links, against=named_run(links.against, of_request["out"]))
    if resume:
        resume = named_run(resume, of_request["out"])
        job = _resumed(resume, scenarios, joined)
        _require_as_many(_ranks_before([f"{job.file}::{job.scenario}"], links), [job])
        _measure([job], joined, quiet, links, form, is_resumed=True)
    if not scenarios:
        command = "trace" if show_paths else "run"
        raise UserError(f"{command} needs a SCENARIO; `distbench list` shows the shipped scenarios")
    request = Request(targets=scenarios, started_at=STARTED_AT, **of_request)
    num_ranks_before = _ranks_before(scenarios, links)
    if links.fail_on_outlier and joined is None:
        where = on_allocation(where)
    if where.nodes or where.launcher or where.hosts is not None:
        sys.exit(run_on_nodes(request, where, dry_run, is_joined=joined is not None))
    refuse_without("--nodes", *vars(where))
    jobs = jobs_of(request, joined)
    ending_of(ctx).run_files = [job.run_file for job in jobs]
    for job in jobs:
        if job.note and _is_first(joined):
            say(f"{job.scenario}: {job.note}", err=True)
    _require_as_many(num_ranks_before, jobs)
    if dry_run:
        if _is_first(joined):
            say_dry_run(jobs, request.out, form)
        return
    if joined is None:
        confirm_ranks(jobs, yes)
    _measure(jobs, joined, quiet or not _is_first(joined), links, form, show_paths=show_paths)


def ending_of(ctx: click.Context) -> Ending:
    """Return the current command's ending so far."""
    ending: Ending = ctx.meta.setdefault(__name__, Ending())
    return ending


def _is_first(joined: "Joined | None") -> bool:
    """Whether this process prints for all ranks, because it started the ranks or joined as rank 0."""
    return joined is None or joined.rank == 0


def _resumed(file: Path, scenarios: tuple[str, ...], joined: "Joined | None") -> Job:
    """The rest of an interrupted run, as its file describes it."""
    from distbench.launch.run_job import job_left_of

    if others := [*scenarios, *(word for name, word in given().items() if name not in BESIDE_RESUME)]:
        raise UserError(
            f"--resume continues {file} with the options of that run and rejects {others[0]}; leave out {others[0]}"
        )
    if joined:
        raise UserError("--resume does not work in a process that a launcher started; run distbench directly")
    return job_left_of(file)


def confirm_ranks(jobs: Sequence[Job], yes: bool) -> None:
    """Require a confirmation of more than RANKS_PER_CPU ranks per CPU. Raise UserError without a terminal.

    So many ranks mostly measure waiting for CPUs, and a typing error in --mesh can crash a machine.
    """
    largest = max((job for job in jobs if job.device == "cpu"), key=lambda job: mesh_size(job.mesh), default=None)
    if yes or largest is None:
        return
    num_cpus, num_ranks = largest.environment.get("num_cpus"), mesh_size(largest.mesh)
    if not isinstance(num_cpus, int) or num_ranks <= RANKS_PER_CPU * num_cpus:
        return
    problem = f"{largest.scenario} on {format_mesh(largest.mesh)} starts {num_ranks} ranks on {num_cpus} CPUs"
    if not is_terminal():
        limit = f"more than {RANKS_PER_CPU} ranks per CPU mostly measure waiting, and may crash this machine"
        raise UserError(f"{problem}; {limit}; give a smaller --mesh, or add --yes")
    if not click.confirm(f"{problem}. Start them?", err=True):
        raise UserError("nothing was started; give a smaller --mesh")


def is_terminal() -> bool:
    """Return whether standard input and standard error are a terminal."""
    return sys.stdin is not None and sys.stderr is not None and sys.stdin.isatty() and sys.stderr.isatty()


def say_dry_run(jobs: Sequence[Job], out: Path, form: str) -> None:
    """Print the list of --dry-run: each scenario with its time and its cases, and the totals.

    Raises:
        UserError: a scenario is declared wrongly, or the selection has no case of any scenario.
    """
    records = _dry_run_records(jobs, out)
    if form == "json":
        click.echo(json.dumps(records, indent=1))
        return
    lines = []
    for record in records:
        mesh, cases = record["mesh"], record["cases"]
        head = (
            f"{record['scenario']} on {format_mesh(mesh)} ({count_text(mesh_size(mesh), 'rank')}, {record['device']})"
        )
        lines += [f"{head}: {count_text(len(cases), 'case')}, {record['time']}", *(f"  {case_id}" for case_id in cases)]
    if len(records) > 1:
        times_s = [record["seconds"] for record in records if record["seconds"] is not None]
        num_others = len(records) - len(times_s)
        others = f", plus {count_text(num_others, 'scenario')} without an earlier run" if num_others else ""
        total = f"about {sum(times_s):.0f} s{others}" if times_s else "no earlier run with these settings"
        num_cases = sum(len(record["cases"]) for record in records)
        lines.append(f"{count_text(num_cases, 'case')} of {count_text(len(records), 'scenario')}: {total}")
    say_lines(lines)


def _dry_run_records(jobs: Sequence[Job], out: Path) -> list[dict[str, Any]]:
    from distbench.processes import ask_child

    answers = ask_child(
        "case_ids",
        given=[job.to_record() for job in jobs],
        timeout_s=LIST_TIMEOUT_S,
        failure="the cases cannot be listed: {why}; try `distbench doctor`",
    )
    errors = [answer["user_error"] for answer in answers if "user_error" in answer]
    if errors and (len(errors) == len(jobs) or not jobs[0].chosen):
        raise UserError(errors[0])
    records = []
    for job, answer in zip(jobs, answers, strict=True):
        if "ids" in answer:
            seconds, words = estimated_time(job, len(answer["ids"]), out)
            about = {"scenario": job.scenario, "mesh": job.mesh, "device": job.device}
            records.append({**about, "seconds": seconds, "time": words, "cases": answer["ids"]})
    return records


def estimated_time(job: Job, num_cases: int, out: Path) -> tuple[float | None, str]:
    """Return the estimated wall time of a job in seconds and in words.

    The estimate is from the run of `earlier_run`. Without such a run the seconds are None, and the words state the
    budget.
    """
    run = earlier_run(job, out)
    if run is None or not run.footer:
        timed_s = min(job.settings.budget_s, num_cases * job.settings.max_case_s)
        return None, f"no earlier run with these settings: {timed_s:.0f} s timed, plus start-up"
    seconds = run.footer["wall_s"] * num_cases / len(run.cases)
    day = datetime.datetime.fromtimestamp(run.about.started_at, datetime.UTC).strftime("%Y-%m-%d")
    rate = "" if num_cases == len(run.cases) else f", {count_text(len(run.cases), 'case')} then"
    return seconds, f"about {seconds:.0f} s (as on {day}{rate})"


def earlier_run(job: Job, out: Path) -> "Run | None":
    """Return the newest finished run of the same scenario, mesh, device and settings on this machine."""
    from distbench.records.results_folder import newest_finished

    settings = vars(job.settings)
    return newest_finished(
        out,
        job.scenario,
        lambda about: (
            (about.mesh, about.device) == (job.mesh, job.device)
            and all(about.settings.get(name, settings[name]) == settings[name] for name in DECIDE_TIME)
        ),
    )


def _measure(
    jobs: list[Job],
    joined: "Joined | None",
    silent: bool,
    links: LinkOptions,
    form: str,
    is_resumed: bool = False,
    show_paths: bool = False,
) -> NoReturn:
    """Launch the jobs, show the results unless the user interrupted, and end with the exit code."""
    exit_code = run_all(jobs, joined, silent, prints_first=form != "json" and not show_paths)
    if exit_code != INTERRUPTED and _is_first(joined) and (form == "json" or not silent):
        if show_paths:
            _show_paths(jobs, form)
        elif form == "json" and links.fail_on_outlier:
            pass  # the verdict below
        elif form == "json":
            click.echo(_json_of(jobs))
        else:
            show_summary(jobs, is_resumed)
    if missing := ending_of(click.get_current_context()).missing:
        say_once(f"distbench: error: {missing}")
    if exit_code in (0, 1) and _is_first(joined) and links.given:
        failure = ending_of(click.get_current_context()).message if exit_code else ""
        code = links_code(jobs, links, silent, form, failure)
        exit_code = max(code, exit_code) if links.fail_on_outlier else exit_code
    sys.exit(exit_code)


def run_all(jobs: list[Job], joined: "Joined | None", silent: bool, prints_first: bool = False) -> int:
    """Launch jobs one after the other, and return the highest exit code; `prints_first` prints the first time if there
    are several jobs.

    After a rejected scenario, the next scenarios run. Ctrl-C and a full disk stop all scenarios.
    """
    from distbench.launch import MODULE, RankProcesses, launch_on
    from distbench.launch.display import display_for

    outcomes: list[JobOutcome] = []
    with RankProcesses(jobs, joined, MODULE) as ranks:
        for job in jobs:
            with display_for(job.scenario, silent) as display:
                outcome = launch_on(ranks, job, display)
            _say_outcome(job, outcome, silent)
            outcomes.append(outcome)
            if prints_first and not silent and len(jobs) > len(outcomes) == 1:
                _say_first(job, len(jobs) - 1)
            if outcome.exit_code == INTERRUPTED or outcome.is_storage_full:
                break
    if all(outcome.none_chosen for outcome in outcomes):
        raise UserError(outcomes[0].none_chosen)
    # The last sentence of the command lists the scenarios that were not measured.
    rejected = [job.scenario for job, outcome in zip(jobs, outcomes, strict=False) if outcome.is_refused]
    missing = {"rejected": rejected, "not run": [job.scenario for job in jobs[len(outcomes) :]]}
    if len(jobs) > 1 and any(missing.values()):
        parts = [
            f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {why}"
            for why, names in missing.items()
            if names
        ]
        ending = ending_of(click.get_current_context())
        ending.missing = f"of {len(jobs)} scenarios, {'; '.join(parts)}"
        ending.message = f"{ending.missing} ({ending.message})" if ending.message else ending.missing
    return max(outcome.exit_code for outcome in outcomes)


def _say_first(job: Job, num_more: int) -> None:
    """Print the time of the first scenario's first case: the summary of all scenarios may come minutes later."""
    from distbench.records.run_file import read_run
    from distbench.show.units import time_text

    cases = read_run(Path(job.run_file)).cases if Path(job.run_file).exists() else []
    if timed := [case for case in cases if case["status"] == "ok" and case.get("samples_s")]:
        time, case_id = time_text(median(timed[0]["samples_s"])), timed[0]["case"]["id"]
        say(f"First result: {time} per iteration of {case_id}. Scenarios left: {num_more}")


def _say_outcome(job: Job, outcome: "JobOutcome", silent: bool) -> None:
    run_file = Path(job.run_file)
    if message := outcome.message or (_why_not_ok(run_file) if outcome.exit_code else ""):
        say_once(f"distbench: {job.scenario}: {cut(_with_plan_problems(job, message))}")
        ending = ending_of(click.get_current_context())
        # The last refusal is the message of the command, whatever outcomes follow.
        if outcome.user_can_fix or not ending.is_refusal:
            ending.message, ending.is_refusal = f"{job.scenario}: {cut(message)}", outcome.user_can_fix
    if outcome.warning:
        say_once(f"distbench: warning: {job.scenario}: {outcome.warning}")
    if outcome.none_chosen and not silent:
        say(f"{job.scenario}: no case matches -k", err=True)
    elif not silent and run_file.exists():
        counts = ", ".join(f"{count} {status}" for status, count in sorted(outcome.num_by_status.items()))
        say(f"{job.scenario}: {counts or 'no case finished'} -> {short_path(run_file)}", err=True)
        if job.trace_paths:
            say(f"{job.scenario}: {_of_traces(run_file)}", err=True)


def _with_plan_problems(job: Job, message: str) -> str:
    """The message, with problems of a plan and a mesh that works in the format of `distbench check`."""
    if PLAN_PROBLEMS not in message:
        return message
    from distbench.cli.check import check_jobs
    from distbench.show.terminal import width_here, wrap

    texts, num_problems = [message], 0
    with contextlib.suppress(UserError):
        texts, num_problems = check_jobs([job])
    if not num_problems:
        return message
    lines = [line for text in texts for line in wrap(text, width_here(), "    ")]
    return "\n".join([f"{PLAN_PROBLEMS}, so nothing was measured", *lines])


def _why_not_ok(run_file: Path) -> str:
    """The first case that is neither ok nor skipped with its reason, and the number of others."""
    from distbench.records.run_file import read_run

    bad = [case for case in read_run(run_file).cases if case["status"] not in ("ok", "skipped")]
    if not bad:
        return ""
    first = f"{bad[0]['case']['id']} is {bad[0]['status']} ({str(bad[0].get('error'))[:MAX_REASON]})"
    more = f"; {len(bad) - 1} more: see `distbench report {short_path(run_file)}`" if len(bad) > 1 else ""
    return clean(first) + more


def _of_traces(run_file: Path) -> str:
    """The result of --trace-paths, and the command that shows it."""
    from distbench.records.run_file import read_run

    measured = read_run(run_file)
    if not any(record["case"]["kind"] == "step" for record in measured.cases):
        return "--trace-paths traced no step, because no case of this scenario is a step"
    failed = [f"{trace['case_id']} was not traced: {trace['error']}" for trace in measured.traces if "error" in trace]
    traced = [trace for trace in measured.traces if "error" not in trace]
    if not traced:
        return "; ".join(["no step was traced", *failed])
    notes = [f"traced {len(traced)} -> distbench report --paths {short_path(run_file)}"]
    if ratios := [trace["overhead"]["ratio"] for trace in traced if trace["overhead"]["ratio"]]:
        notes.append(f"tracing overhead: up to {max(0.0, 100 * (max(ratios) - 1)):.0f} % CPU")
    # A profiler without times has a reason.
    notes += {why for trace in traced if trace["method"] == "profiler" and (why := trace["exposed_reason"])}
    if num_differing := sum(bool((trace.get("agreement") or {}).get("differences")) for trace in traced):
        notes.append(f"two methods recorded different collectives in {num_differing} of these steps; see the report")
    return "; ".join([*notes, *failed])


def _show_paths(jobs: Sequence[Job], form: str) -> None:
    """Print the output of `report --paths` on these runs. If no step was traced, `run` has printed the reason."""
    from distbench.records.run_file import read_run
    from distbench.report import render_paths

    run_files = [Path(job.run_file) for job in jobs if Path(job.run_file).exists()]
    if traced := tuple(file for file in run_files if any("error" not in trace for trace in read_run(file).traces)):
        say(render_paths(traced, traced[0].parents[1], form).text)


def _json_of(jobs: Sequence[Job]) -> str:
    """One record per case, as `report --json` prints them."""
    from distbench.report import render

    run_files = tuple(Path(job.run_file) for job in jobs if Path(job.run_file).exists())
    return render(run_files, run_files[0].parents[1], "json", None, ()).text if run_files else "[]"


def show_summary(jobs: Sequence[Job], is_resumed: bool = False) -> None:
    """Print the summary of the results, if there are results, with the command for the whole report."""
    if run_files := [Path(job.run_file) for job in jobs if Path(job.run_file).exists()]:
        from distbench.report import summary_of

        out = run_files[0].parents[1]
        elsewhere = [] if out == Path("results").resolve() else ["--results", str(short_path(out))]
        words = [str(short_path(path)) for path in run_files] if is_resumed else elsewhere
        if is_terminal():
            say("", err=True)
        say(summary_of(run_files, shlex.join(["distbench", "report", *words])))


def _ranks_before(targets: Sequence[str], links: LinkOptions) -> int | None:
    """The number of ranks of the run of --against, None without that option.

    Raises:
        UserError: all scenarios are shipped and none measures links; the run of --against cannot be read or has no
            links; the hardware of --expect is unknown; or the folder of --verdict-out cannot be made.
    """
    if not links.given:
        return None
    _expected(links)
    if links.verdict_out:
        from distbench.judge.preflight import FILES

        make_folder(links.verdict_out, "--verdict-out")
        # A failed launch must not leave the lists of an earlier preflight.
        for name in FILES:
            Path(links.verdict_out, name).unlink(missing_ok=True)
    from distbench.judge.links import link_run_of
    from distbench.records.run_file import read_run
    from distbench.spec import find
    from distbench.spec.discovery import scenario_folder

    entries = [entry for target in targets for entry in find(target)]
    # The cases of a user's file are known only at run time.
    if entries and not any("links" in entry.tags or entry.file.parent != scenario_folder() for entry in entries):
        raise UserError(ONLY_LINKS.format(links.given, "is not among the given scenarios"))
    if links.against is None:
        return None
    before = link_run_of(read_run(links.against))
    if before is None:
        raise UserError(f"--against {links.against} has no links; give a run file of scenario links")
    return len(before.hosts)


def _require_as_many(num_ranks: int | None, jobs: Sequence[Job]) -> None:
    """Refuse an earlier run of `num_ranks` ranks, which no job has."""
    sizes = sorted({mesh_size(job.mesh) for job in jobs})
    if num_ranks is not None and num_ranks not in sizes:
        problem = f"the earlier run has {count_text(num_ranks, 'rank')}, but this run has {', '.join(map(str, sizes))}"
        raise UserError(f"--against: {problem}; give a run with the same ranks on each host, or another --mesh")


def _expected(links: LinkOptions) -> "ExpectedRates | None":
    """The rates of the hardware of --expect: between two devices if the file has them, else of collectives."""
    if not links.expect:
        return None
    from distbench.judge.preflight import BETWEEN, WITHIN, ExpectedRates
    from distbench.simulate.hardware_file import hardware_of, hardware_record

    hardware = hardware_of(*hardware_record(links.expect, "--expect"))
    of_level = {
        WITHIN: (hardware["node_base_s"], hardware["peer_bytes_per_s"]),
        BETWEEN: (hardware["network_base_s"], hardware["network_bytes_per_s"]),
    }
    return ExpectedRates(hardware.name, of_level)


def links_code(jobs: Sequence[Job], links: LinkOptions, silent: bool, form: str, failure: str = "") -> int:
    """Print slow links, links that are slower than in an earlier run, and rates below the rates of the hardware.

    Args:
        jobs: the measured jobs.
        links: the earlier run, the hardware, and the folder for the verdict, if given.
        silent: print only slow links and unknown outcomes, because no summary was shown.
        form: "json" prints the verdict as JSON in addition, with --fail-on-outlier.
        failure: the reason if a case failed, such as a host that no longer responds.

    Returns:
        The exit code: 1 if a rank or link is slow or a case failed, 3 if a rank or link of half the speed could be
        undetected, else 0.

    Raises:
        UserError: no links were measured, the earlier run has other links, or a file cannot be written.
    """
    from distbench.judge.links_text import judged, link_hosts_note, loss_lines
    from distbench.judge.preflight import EXIT_CODES, Preflight, level_rates
    from distbench.records.run_file import read_run

    silent = silent or form == "json"
    runs = [read_run(Path(job.run_file)) for job in jobs if Path(job.run_file).exists()]
    of_links = [(run, verdict) for run in runs if (verdict := judged(run))]
    if not of_links:
        return _nothing_measured(links, form, failure)
    verdicts, expected = [], _expected(links)
    before = read_run(links.against) if links.against else None
    for run, verdict in of_links:
        since = judged(run, before) if before else None
        for line in loss_lines(run) if silent else ():
            say(line, err=True)
        if before and since and not silent:
            say("\n".join([*link_hosts_note(run, before), *since.lines, since.next_command]))
        for judgement in (verdict, since):
            if judgement and silent and (judgement.is_slow or not judgement.is_conclusive):
                say(judgement.lines[0], err=True)
        verdicts += [verdict, *([since] if since else [])]
    levels = [level for _, verdict in of_links for level in level_rates(verdict.links, expected)]
    preflight = Preflight(of_links[0][0].path.name, verdicts, levels, expected.name if expected else "", failure)
    for level, line in zip(levels, preflight.rate_lines(), strict=False):
        if level.slow or not silent:
            say(line, err=silent)
    if failure and not silent:
        say(f"FAIL: {failure}")
    for name, content in preflight.files() if links.verdict_out else ():
        write(Path(links.verdict_out or ".", name), content)
    if form == "json" and links.fail_on_outlier:
        click.echo(json.dumps(preflight.record(), indent=1))
    return EXIT_CODES[preflight.verdict]


def _nothing_measured(links: LinkOptions, form: str, failure: str) -> int:
    """Print the verdict as JSON, if required, after a failure before the first links; return the exit code.

    Raises:
        UserError: without a failure, the scenarios measure no links.
    """
    if not failure:
        raise UserError(ONLY_LINKS.format(links.given, "has no results"))
    if form == "json" and links.fail_on_outlier:
        lines = [f"FAIL: {failure}"]
        click.echo(json.dumps({"verdict": "FAIL", "exit_code": 1, "lines": lines, "causes": [], "hosts": {}}, indent=1))
    return 1
