"""The pytest plugin: what a test may ask for, what it gets, and docs/pytest.md executed on real ranks."""

import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from conftest import ROOT
from processes import Ranks

import distbench.launch
from distbench.launch import JobOutcome
from distbench.pytest_plugin.fixture import Distbench, MeasuredCase
from distbench.records.run_file import Case, CaseResult, append, read_run
from distbench.spec import Job, UserError

pytest_plugins = ("pytester",)
PAGE = (ROOT / "docs" / "pytest.md").read_text()
NAMES = [f"test_gather::bench_gather/numel={numel}/tp=2" for numel in (64, 65536)]
PLUGINS = ("-p", "distbench.pytest_plugin", "-p", "no:cacheprovider")


def bench(mesh: Any, numel: int = 4, *, op: str = "sum", shape: Any = None) -> Any:
    """Nothing to time.

    Never called: what would launch its ranks is replaced.
    """


class Item:
    """As much of a test as the fixture looks at."""

    config = object()
    nodeid, name = "test_x.py::test_x", "test_x"

    def __init__(self, **marker: Any) -> None:
        self._marker = SimpleNamespace(args=(), kwargs=marker)
        self.sections: list[tuple[str, str]] = []

    def get_closest_marker(self, name: str) -> Any:
        return self._marker if name == "distbench" else None

    def add_report_section(self, when: str, key: str, content: str) -> None:
        self.sections.append((key, content))


Play = Callable[..., list[Job]]


@pytest.fixture
def play(known_host: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """`play(status, message, *results)`: launches end so; returns the list that their jobs will be in."""

    def played(status: str, message: str, *results: CaseResult, log: str = "") -> list[Job]:
        jobs: list[Job] = []

        def launch(job: Job, joined: None, watcher: Any) -> JobOutcome:
            jobs.append(job)
            Path(job.log_dir).mkdir(parents=True)
            (Path(job.log_dir) / "rank1.log").write_text(log)
            for record in (HEADER, *(result.to_record() for result in results)):
                append(Path(job.run_file), record)
            return JobOutcome(job, status, message, num_by_status={result.status: 1 for result in results})

        monkeypatch.setattr(distbench.launch, "launch", launch)
        return jobs

    yield played


HEADER = {"type": "run", "schema_version": 1, "run_id": "x", "job": {}, "environment": {}}
PARAMS = {"call": "bench", "variant": "numel=8", "mesh": "tp=2"}
OK = CaseResult(
    Case("call/bench/numel=8/tp=2", "call", PARAMS), "ok", [0.003, 0.001, 0.002], rank_median_s=[0.001, 0.002]
)
WRONG = replace(OK, status="wrong", error="rank 1: off by one")


def test_a_function_becomes_a_job_and_its_run_file_cases(tmp_path: Path, play: Play) -> None:
    jobs, unshown = play("complete", "", OK), []
    (case,) = Distbench(Item(mesh={"tp": 2}, timeout_s=7, quick=True), tmp_path, unshown)(bench, 8)  # type: ignore[arg-type]
    assert (case.id, case.status, case.median_s) == (OK.case.id, "ok", 0.002)
    assert math.isnan(case.ci_s[0]), "three samples of one pass have no interval"
    assert case.rank_median_s == (0.001, 0.002) and case.run_file.parent.parent == tmp_path
    assert unshown == [case] and case.line() == "call/bench/numel=8/tp=2: median 2 ms, 3 samples"
    (job,) = jobs
    assert (job.scenario, job.file, job.is_call) == ("bench", str(Path(__file__).resolve()), True)
    assert (job.variants, job.axes, job.mesh, job.device) == ([{"numel": 8}], ["numel"], {"tp": 2}, "cpu")
    assert job.timeout_s == 7 and job.settings.max_case_s < 1


def test_a_sweep_is_one_launch_of_all_combinations(tmp_path: Path, play: Play) -> None:
    jobs = play("complete", "", OK)
    Distbench(Item(), tmp_path, []).sweep(bench, numel=(1, 2), op=["sum", "max"])  # type: ignore[arg-type]
    assert [tuple(variant.values()) for variant in jobs[0].variants] == [(1, "sum"), (1, "max"), (2, "sum"), (2, "max")]
    with pytest.raises(pytest.fail.Exception, match=r"sweep\(numel=3\): give a list"):
        Distbench(Item(), tmp_path, []).sweep(bench, numel=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "message", "results", "expected"),
    [
        ("complete", "", [WRONG], "call/bench/numel=8/tp=2 is wrong: rank 1: off by one"),
        ("timeout", "set-up made no progress for 5 s", [], "set-up made no progress for 5 s\nnothing was measured; "),
        ("complete", "1 case broke the launch: call/bench/numel=8/tp=2: rank 1 was killed by SIGKILL", [WRONG], None),
    ],
)
def test_whatever_is_not_ok_fails_the_test(
    tmp_path: Path, play: Play, status: str, message: str, results: list[CaseResult], expected: str | None
) -> None:
    play(status, message, *results, log="what rank 1 said\n")
    item: Any = Item()
    with pytest.raises(pytest.fail.Exception) as failed:
        Distbench(item, tmp_path, [])(bench)
    text = str(failed.value)
    assert text.startswith(expected) if expected else text == message
    assert item.sections == [("rank1 of distbench", "what rank 1 said")]


def test_a_pytest_benchmark_that_takes_no_rows_is_warned_about_and_costs_nothing(tmp_path: Path, play: Play) -> None:
    play("complete", "", OK)
    item: Any = Item()
    item.config, message, unshown = (
        SimpleNamespace(_benchmarksession=SimpleNamespace(disabled=False, skip=False)),
        [],
        [],
    )
    item.warn = message.append
    cases = Distbench(item, tmp_path, unshown)(bench)
    assert unshown == cases and "does not accept distbench's rows" in str(message[0])


def test_ctrl_c_ends_the_whole_session(tmp_path: Path, play: Play) -> None:
    play("interrupted", "interrupted")
    with pytest.raises(KeyboardInterrupt):
        Distbench(Item(), tmp_path, [])(bench)  # type: ignore[arg-type]


def test_unless_asked_for_tests_are_skipped_with_a_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("def test_it(distbench): raise AssertionError\ndef test_other(): pass")
    result = pytester.runpytest_inprocess(*PLUGINS, "-rs", "--strict-markers")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(["*times gloo ranks; give --distbench to run this test"])
    result.stdout.no_fnmatch_line("*= distbench =*")
    result = pytester.runpytest_inprocess(*PLUGINS, "-m", "distbench", "--distbench")
    result.assert_outcomes(failed=1, deselected=1)


def test_where_pytest_benchmark_is_not_there_cases_are_printed_a_line_each(
    known_host: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(
        f"""
        from pathlib import Path
        import distbench.launch
        from distbench.launch import JobOutcome
        from distbench.records.run_file import append

        def launch(job, joined, watcher):
            for record in {[HEADER, OK.to_record()]!r}:
                Path(job.run_file).parent.mkdir(parents=True, exist_ok=True)
                append(Path(job.run_file), record)
            return JobOutcome(job, "complete")

        distbench.launch.launch = launch
        """
    )
    pytester.makepyfile("def bench(mesh): ...\ndef test_it(distbench): assert distbench(bench)[0].median_s == 0.002")
    monkeypatch.setattr(distbench.launch, "launch", distbench.launch.launch)  # put back what the conftest replaces
    result = pytester.runpytest_inprocess(*PLUGINS, "--distbench")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= distbench =*", "call/bench/numel=8/tp=2: median 2 ms, 3 samples"])


DIES = """
import os, signal
import torch.distributed as dist

def bench(mesh):
    print("rank", dist.get_rank(), "is here")
    def call():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    return call

def test_it(distbench):
    distbench(bench)

def test_closure(distbench):
    def bench(mesh): ...
    distbench(bench)
"""


@pytest.fixture(scope="module")
def executed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, output) of one pytest run with the page's example and with a rank that dies."""
    folder = tmp_path_factory.mktemp("executed")
    result = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert result
    (folder / "test_gather.py").write_text(result.group(1))
    (folder / "test_dies.py").write_text(DIES)
    command = [ranks.forked_python, "-m", "pytest", *PLUGINS, "--strict-markers", "-W", "error"]
    command += ["-p", "pytest_benchmark.plugin", "--benchmark-json=all.json", "--benchmark-autosave"]
    command += ["--distbench", "--distbench-out=kept"]
    done = ranks.run(*command, cwd=folder, variables={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, timeout=240)
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    return folder, done.stdout


def test_pytest_benchmark_shows_and_stores_the_samples_of_the_pages_example(executed: tuple[Path, str]) -> None:
    folder, text = executed
    run_files = (folder / "kept").rglob("*-bench_gather-*.jsonl")
    cases = [case for path in run_files for case in read_run(path).cases]
    assert all(name in text for name in NAMES)
    rows = json.loads((folder / "all.json").read_text())["benchmarks"]
    assert [row["name"] for row in rows] == NAMES
    assert [row["stats"]["data"] for row in rows] == [case["samples_s"] for case in cases]
    assert rows[0]["fullname"] == f"test_gather.py::{NAMES[0]}" and rows[0]["params"]["mesh"] == "tp=2"
    assert rows[0]["extra_info"]["checked"] is True


def test_pytest_benchmarks_own_command_reads_what_was_stored(ranks: Ranks, executed: tuple[Path, str]) -> None:
    folder, _ = executed
    compared = ranks.python("-m", "pytest_benchmark", "compare", "--csv=table", "--columns=median,rounds", cwd=folder)
    assert compared.returncode == 0 and all(name in compared.stdout for name in NAMES), compared.stderr
    rows = json.loads((folder / "all.json").read_text())["benchmarks"]
    lines = (folder / "table.csv").read_text().splitlines()[1:]
    assert sorted(int(line.rpartition(",")[2]) for line in lines) == sorted(row["stats"]["rounds"] for row in rows)


def test_a_rank_that_dies_fails_its_test_with_the_launchs_sentence_and_its_log(executed: tuple[Path, str]) -> None:
    _, text = executed
    assert re.search(r"^1 case broke .*: call/bench/dp_shard=2: rank 1 was killed by SIGKILL; its log is", text, re.M)
    assert "rank 1 is here" in text and "cannot be imported by ranks in other processes" in text
    assert "another exception" not in text


def test_a_measured_case_reads_a_record_that_holds_little() -> None:
    record = {"case": {"id": "call/x/tp=2"}, "status": "aborted", "error": "killed"}
    (case,) = MeasuredCase.all_of([record], Path("x.jsonl"))
    assert (case.samples_s, case.params, case.error) == ((), {}, "killed") and case.median_s != case.median_s


def test_cases_of_a_sweep_are_compared_by_the_passes_that_both_had() -> None:
    def sweep(num_passes: int) -> list[MeasuredCase]:
        records = []
        for name, seconds in (("slow", 0.2), ("fast", 0.1)):
            samples = [seconds * (1 + 0.2 * (number % 3)) * (1 + 0.001 * (number % 2)) for number in range(num_passes)]
            passes = [(number, 1) for number in range(num_passes)]
            records.append({"case": {"id": name}, "status": "ok", "samples_s": samples, "passes": passes})
        return MeasuredCase.all_of(records, Path(f"{num_passes}.jsonl"))

    slow, fast = sweep(9)
    assert slow.versus(fast).verdict == "slower" and slow.versus(fast).ratio == pytest.approx(2)
    assert fast.versus(slow).verdict == "faster" and fast.versus(slow).ratio == pytest.approx(0.5)
    assert not math.isnan(slow.ci_s[0]) and "95 % CI" in slow.line()
    few, others = sweep(7)
    assert few.versus(others).verdict == "too few passes" and math.isnan(few.ci_s[0])
    for other in (few, slow):
        with pytest.raises(UserError, match=r"belong to different launches|with itself"):
            slow.versus(other)


@pytest.mark.long
def test_all_pairs_of_a_sweep_of_identical_cases_are_one_family() -> None:
    # The levels of passes beside a neighbour that is busy half of the time: mostly one of two, 3 times apart.
    draw, with_verdict, missed = np.random.default_rng(4), 0, 0
    for number in range(100):
        samples = np.exp(draw.normal(0, 0.1, (7, 12)) + np.log(3) * (draw.random((7, 12)) < 0.3))
        samples[6] *= 5
        records = [
            {"case": {"id": str(row)}, "status": "ok", "samples_s": row_s, "passes": [(at, 1) for at in range(12)]}
            for row, row_s in enumerate(samples.tolist())
        ]
        *same, slower = MeasuredCase.all_of(records, Path(f"{number}.jsonl"))
        verdicts = {one.versus(other).verdict for one, other in itertools.combinations(same, 2)}
        with_verdict += verdicts != {"within noise"}
        missed += any(slower.versus(one).verdict != "slower" for one in same)
    # A family at 2 % has more than 7 of 100 tables with a verdict in 1 of 1,000 series; 15 tests of their own have 20.
    assert with_verdict <= 7 and missed <= 10


@pytest.mark.long
def test_the_communication_page_runs_and_a_failed_count_prints_what_was_counted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    page = (ROOT / "docs" / "assertions.md").read_text()
    # pytester forgets what a run imports, and torch registers its operators once.
    for module in ("communication_assertions", "torch_private"):
        importlib.import_module(f"distbench.{module}")
    for module in ("fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{module}")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    example = page.split("```python\n")[1].split("```")[0]
    try:
        pytester.makepyfile(example)
        missing = pytester.runpytest_inprocess(*PLUGINS)
        missing.stdout.fnmatch_lines(["*model.signature does not exist; write the file once*"])
        dist.destroy_process_group()
        pytester.runpytest_inprocess(*PLUGINS, "--distbench-update").assert_outcomes(passed=1)
        assert (pytester.path / "model.signature").is_file()
        pytester.runpytest_inprocess(*PLUGINS).assert_outcomes(passed=1)
        pytester.makepyfile(example.replace('module="lm_head") == 1', 'module="lm_head") == 2'))
        failed = pytester.runpytest_inprocess(*PLUGINS)
        failed.stdout.fnmatch_lines([line for line in page.splitlines() if line.startswith("E ")])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
