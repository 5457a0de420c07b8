"""All shipped scenarios on the device without hardware (torch's PrivateUse1), by the worker's code for accelerators."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from processes import Children

from distbench.judge.communication_signature import counted, load, stored_for
from distbench.launch import Request, jobs_of
from distbench.spec import list_entries
from distbench.spec.versions import release
from distbench.torch_private import needs_newer
from distbench.torch_private.probe import SPMD_MESH

PROGRAM = Path(__file__).parents[1] / "sim_scenarios.py"
# Scenarios of cases without a model.
WITHOUT_STEPS = ("calibrate", "calibrate_operators", "collectives", "links", "redistribute", "redistribute_lab")
WITHOUT_STEPS += ("dtensor_ops", "collective_ways", "expert_exchange")
# Without a capacity a host must know how many tokens each expert gets, and shapes alone do not tell.
SIMULATED_WITH = {"moe": {"capacity": 1.25}, "moe_tp": {"capacity": 1.25}}
# Of these, variants that ask most of the device: parameters looked for and buckets made anew.
FIRST = {"ddp": {"knob": "static_graph"}}
# All where DISTBENCH_ALL_VARIANTS is set; else some: of 540 redistributions every sixtieth, of a step's variants the
# first, of models at their real size (a layer of it) one.
ALL = "DISTBENCH_ALL_VARIANTS" in os.environ
SOME, VARIANTS = (1, 100) if ALL else (60, 1)
FULL_SIZE = [one.name for one in list_entries() if "real-size" in one.tags and "recipe" not in one.tags]
FULL_SIZE = FULL_SIZE if ALL else ["llama3_8b"]
NUM_LAYERS = {"num_layers": 1}
TOO_OLD = {"spmd_mesh"} if needs_newer(SPMD_MESH) else set()
TOO_OLD |= {"cp_documents"}  # FlexAttention's masks need values
SHIPPED = [one.name for one in list_entries() if "real-size" not in one.tags and one.name not in TOO_OLD]
SHIPPED = [*SHIPPED, *FULL_SIZE]
WITH_STEPS = [name for name in SHIPPED if name not in WITHOUT_STEPS]
# What is made of measurements, or of models at their real size, has no signature.
WITH_SIGNATURES = [name for name in WITH_STEPS if (ROOT / "signatures" / f"{name}.signature").exists()]


def can_run(name: str, variant: Mapping[str, Any]) -> bool:
    return SIMULATED_WITH.get(name, {}).items() <= variant.items()


def wanted(name: str, variants: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    able = [one for one in variants if can_run(name, one)]
    return sorted(able, key=lambda one: not FIRST.get(name, {}).items() <= one.items())


@pytest.fixture(scope="module")
def found(children: Children, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By scenario, all in one child process."""
    jobs = [
        job
        for names, quick in ((SHIPPED[: -len(FULL_SIZE)], True), (FULL_SIZE, False))
        for job in jobs_of(Request(tuple(names), device="cpu", quick=quick, full_mesh=True, shapes_only=True), None)
    ]
    file = tmp_path_factory.mktemp("sim") / "jobs.json"
    able = {job.scenario: wanted(job.scenario, job.variants) for job in jobs}
    every = {name: -(-len(variants) // VARIANTS) for name, variants in able.items()}
    some = [replace(job, variants=tuple(able[job.scenario][:: every[job.scenario]])) for job in jobs]
    few = [replace(job, variants=tuple({**one, **NUM_LAYERS} for one in job.variants)) for job in some]
    some = [fewer if job.scenario in FULL_SIZE else job for job, fewer in zip(some, few, strict=True)]
    file.write_text(json.dumps([job.to_record() for job in some]))
    done = children.run(children.forked_python, PROGRAM, file, SOME, *WITHOUT_STEPS, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def theirs(name: str) -> dict[str, Any]:
    signature = load(stored_for(ROOT / "signatures" / f"{name}.signature", torch.__version__))
    return {case: dict(paths) for case, paths in signature.cases.items()}


def measured(found: dict[str, Any], name: str) -> dict[str, Any]:
    assert "failed" not in found[name], found[name]["failed"]
    return {label: facts for label, facts in found[name].items() if "left_out" not in facts}


@pytest.mark.parametrize("name", WITH_SIGNATURES)
@pytest.mark.long
def test_a_step_communicates_what_it_does_on_the_cpu(found: dict[str, Any], name: str) -> None:
    ours = {label: dict(counted(facts["collectives"])) for label, facts in measured(found, name).items()}
    on_cpu = {case: dict(counted(paths)) for case, paths in found["on_cpu"].get(name, {}).items()} or theirs(name)
    wanted = {case.rpartition(name)[2].removeprefix("/"): paths for case, paths in on_cpu.items()}
    # A CPU has nothing to offload to itself, and so no signature of that; offload communicates as the plain plan does.
    assert ours == {label: wanted.get(label.replace("cpu_offload", "plain")) for label in ours} and any(ours.values())
    assert not ALL or name in SIMULATED_WITH or set(ours) - {"knob=cpu_offload"} == set(wanted)
    left_out = [facts["left_out"] for facts in found[name].values() if "left_out" in facts]
    assert all("ulysses has no load balance" in one or "has no step" in one for one in left_out)


@pytest.mark.long
def test_collectives_start_on_the_device_and_are_those_of_the_cpu(found: dict[str, Any]) -> None:
    ours = measured(found, "collectives")
    assert {case: dict(counted(facts["collectives"])) for case, facts in ours.items()} == theirs("collectives")
    assert all(facts["num_started"] == 1 and facts["isolated_s"] > 0 for facts in ours.values())


@pytest.mark.parametrize("name", WITHOUT_STEPS)
@pytest.mark.long
def test_cases_without_a_model_run_and_start_on_the_device(found: dict[str, Any], name: str) -> None:
    """What communicates starts there; what computes alone starts as its host does."""
    ours = measured(found, name)
    assert len(ours) == len(found[name]) or name in ("dtensor_ops", "redistribute_lab"), found[name]
    assert ours and (name != "redistribute" or set(ours) <= set(theirs(name)))
    for case, facts in ours.items():
        # An operator starts as a step does, wherever its rank is.
        if facts["collectives"] and name != "dtensor_ops":
            assert facts["num_started"] == 1 and facts["isolated_s"] > 0, case
        assert facts["samples_s"][0] > 0
    assert any(facts["collectives"] for facts in ours.values())


@pytest.mark.parametrize("name", ["dtensor_ops", "redistribute"])
@pytest.mark.long
def test_what_is_redistributed_pays_what_it_does_on_the_cpu(found: dict[str, Any], name: str) -> None:
    """But embeddings: torch compares their masks, of which there are no values, or knows no path to one."""
    ours, wanted = measured(found, name), theirs(name)
    both = ours.keys() & wanted.keys()
    unknown = ("/embedding/", "/index/") if release(torch.__version__) < (2, 12) else ("/embedding/",)
    assert all(any(one in case for one in unknown) for case in found[name].keys() - both)
    assert any(map(wanted.get, both))
    paid = {case: dict(counted(ours[case]["collectives"])) for case in both}
    # Where accelerators exchange a CPU gathers.
    equal = [case for case in both if not any(path.kind == "all_to_all" for path in paid[case])]
    assert equal and {case: paid[case] for case in equal} == {case: wanted[case] for case in equal}


@pytest.mark.parametrize("name", WITH_STEPS)
@pytest.mark.long
def test_time_and_memory_come_through_the_seam(found: dict[str, Any], name: str) -> None:
    first = next(iter(measured(found, name).values()))
    (sample_s,) = first["samples_s"]
    assert sample_s > 0 and first["isolated_s"] is None
    phases = {"llama_inference": {"forward"}, "pipeline": {"schedule"}}
    assert set(first["phases"]) >= phases.get(name, {"forward", "backward"})
    assert (first["peak_bytes"], first["peak_reserved_bytes"], first["left"]) == (4096, 4096, 0)
    requested = {"synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"}
    assert set(first["asked"]) == requested


@pytest.mark.long
def test_what_the_device_is_comes_through_the_seam(found: dict[str, Any]) -> None:
    facts = found["facts"]
    assert (facts["device"], facts["device_name"], facts["num_devices"]) == ("sim", "no hardware", 1)
    assert found["current"] == "sim", "torch.accelerator reports it too"


@pytest.mark.parametrize("name", WITH_STEPS)
@pytest.mark.long
def test_streams_wait_for_what_they_read(found: dict[str, Any], name: str) -> None:
    for label, facts in measured(found, name).items():
        assert out_of_order(facts["events"]) == [], label


def out_of_order(events: Iterable[Sequence[Any]]) -> list[str]:
    """What reads memory that another stream wrote without waiting for it, and collectives that nobody waited for.

    Each stream knows how far each other one is, by the events that it waited for (a vector clock); the host by what it
    waited for itself.
    """
    known: dict[int, dict[int, int]] = {}
    at_event: dict[int, dict[int, int]] = {}
    host: dict[int, int] = {}
    written: dict[int, tuple[int, int, str]] = {}
    sent: list[tuple[int, int, str]] = []
    wrong = []

    def learn(stream: int, what: dict[int, int]) -> None:
        mine = known.setdefault(stream, dict(host))
        mine |= {other: max(mine.get(other, 0), number) for other, number in what.items()}

    for kind, stream, *rest in events:
        if kind not in ("EventRecorded", "EventWaited", "HostWaited", "Operator", "Collective"):
            continue
        learn(stream, host)
        mine = known[stream]
        if kind == "EventRecorded":
            at_event[rest[0]] = dict(mine)
        elif kind == "EventWaited":
            learn(stream, at_event.get(rest[0], {}))
        elif kind == "HostWaited":
            host |= {other: max(host.get(other, 0), number) for other, number in mine.items()}
        else:
            mine[stream] = mine.get(stream, 0) + 1
            reads, writes = (rest[5], rest[6]) if kind == "Operator" else ((), ())
            for block, _ in reads:
                by, number, what = written.get(block, (stream, 0, ""))
                if mine.get(by, 0) < number:
                    wrong.append(f"{rest[0]} on stream {stream} reads what {what} on stream {by} writes")
            written |= {block: (stream, mine[stream], rest[0]) for block, _ in writes}
            sent += [(stream, mine[stream], rest[2])] if kind == "Collective" else []
    return wrong + [
        f"nobody waits for {what} on stream {stream}"
        for stream, number, what in sent
        if known[0].get(stream, 0) < number
    ]


def operator(stream: int, name: str, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> list[Any]:
    touched = [[[block, 4] for block in blocks] for blocks in (reads, writes)]
    return ["Operator", stream, name, "memory", 0, "f32", 8, *touched, "forward", ""]


def test_an_order_that_is_wrong_is_seen() -> None:
    step = [
        operator(0, "fill", writes=[1]),
        ["EventRecorded", 0, 10],
        ["EventWaited", 3, 10],
        operator(3, "copy", reads=[1], writes=[2]),
        ["Collective", 3, "forward", "fsdp", "all_gather"],
        ["EventRecorded", 3, 11],
        ["EventWaited", 0, 11],
        operator(0, "split", reads=[2]),
    ]
    assert out_of_order(step) == []
    without_first = [one for one in step if one != ["EventWaited", 3, 10]]
    assert out_of_order(without_first) == ["copy on stream 3 reads what fill on stream 0 writes"]
    without_last = [one for one in step if one != ["EventWaited", 0, 11]]
    assert out_of_order(without_last) == [
        "split on stream 0 reads what copy on stream 3 writes",
        "nobody waits for all_gather on stream 3",
    ]
    assert out_of_order([*without_last[:-1], ["HostWaited", 3], *without_last[-1:]]) == []
