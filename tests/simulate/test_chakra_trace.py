"""Chakra traces of simulated steps: read back by the schema, replayed by their dependencies alone, on every rank."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chakra_reader import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVE,
    COMPUTE,
    NODE_TYPES,
    RECEIVE,
    SEND,
    TYPES,
    Node,
    check_times,
    nodes_of,
)
from click.testing import CliRunner
from test_simulate_clock import HEAD, copy, gather, machine, matmul, run
from test_simulated_pipelines import message, rank, two_stages

from distbench.cli.main import main
from distbench.simulate.chakra_trace import chakra_files
from distbench.simulate.hardware_file import Figure, Hardware
from distbench.simulate.recording import (
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    HostWaited,
    Recording,
    save_recordings,
)
from distbench.simulate.simulation import Simulation


def traces_of(*recordings: Recording, hardware: Hardware | None = None) -> tuple[list[list[Node]], dict[str, Any]]:
    """The nodes of each rank, and the groups; after checks of names."""
    simulations = Simulation.all_of(recordings, hardware or machine(), False, ())
    files = dict(chakra_files(simulations))
    groups = json.loads(files.pop("comm_groups.json"))
    assert [*files] == [f"mine.{rank}.et" for rank in range(recordings[0].world_size)]
    return [nodes_of(data) for data in files.values()], groups


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.long
def test_dependencies_and_durations_are_the_simulated_step(seed: int) -> None:
    draw = random.Random(seed)
    groups = (((2, 1),), ((4, 2),), ((8, 1),))

    def event() -> Event:
        seconds, stream = draw.uniform(0, 1e-3), draw.randrange(4)
        return draw.choice(
            (
                matmul(stream, seconds),
                gather(stream, seconds, ranks=groups[0]),
                gather(stream, seconds, ranks=groups[2])._replace(group_size=8, kind="reduce_scatter"),
                EventRecorded(stream, draw.randrange(3)),
                EventWaited(stream, draw.randrange(3)),
                copy(stream, seconds, draw.choice(("to_device", "to_host", "on_host"))),
                draw.choice((HostWaited(stream), matmul(stream, 0))),
            )
        )

    host_s, launch_s = draw.choice(((0, 0), (1e-5, 2e-5), (5e-4, 1e-4), (5e-4, 0)))
    hardware = machine(host_s=host_s, launch_s=launch_s, copy_bytes_per_s=1e9)
    hardware = replace(hardware, figures={**hardware.figures, "host_bytes_per_s": Figure(1e9, "guess", "1 B per ns")})
    recording = run(*(event() for _ in range(60)), matmul(0, 1e-3))
    ranks, _ = traces_of(recording, hardware=hardware)
    step_us = 1e6 * Simulation(recording, hardware).timed.step_s
    assert check_times(ranks) == pytest.approx(step_us, abs=1)


def test_groups_sizes_and_types_on_every_rank() -> None:
    """2 x 4 ranks: a gather along the outer mesh dim, an all-reduce along the inner one."""
    outer = gather(0, 1, ranks=((2, 4),))
    inner = gather(0, 1, ranks=((4, 1),))._replace(kind="all_reduce", group_size=4, mesh_dim="tp", owner="layers.1")
    alone = gather(0, 1, ranks=((1, 0),))._replace(group_size=1)
    recording = run(outer, matmul(0, 2, "layers.0"), inner, alone, head=replace(HEAD, mesh={"dp_shard": 2, "tp": 4}))
    ranks, groups = traces_of(recording)
    assert sorted(groups.values()) == [[0, 1, 2, 3], [0, 4], [1, 5], [2, 6], [3, 7], [4, 5, 6, 7]]
    for number, nodes in enumerate(ranks):
        gathered, multiplied, reduced = nodes
        assert [node.type for node in nodes] == [COLLECTIVE, COMPUTE, COLLECTIVE]
        assert groups[gathered.attributes["pg_name"]] == [number % 4, number % 4 + 4]
        assert groups[reduced.attributes["pg_name"]] == [number // 4 * 4 + offset for offset in range(4)]
        assert gathered.attributes["comm_type"] == ALL_GATHER and reduced.attributes["comm_type"] == ALL_REDUCE
        # Of a gather, one rank's input.
        assert gathered.attributes["comm_size"] == outer.payload_bytes // 2
        assert reduced.attributes["comm_size"] == inner.payload_bytes
        assert multiplied.attributes == {"is_cpu_op": 0, "num_ops": 2 * 10**9, "tensor_size": 0}
        assert (multiplied.name, multiplied.duration_us) == ("aten.mm.default layers.0", 2_000_000)
        assert gathered.name == "all_gather dp_shard layers.0"


def test_messages_of_a_pipeline_have_both_ends() -> None:
    """Two pipelines of two stages, of which the one of rank 0 is recorded."""
    recordings = [replace(each, head=replace(each.head, mesh={"pp": 2, "tp": 2})) for each in two_stages()]
    recordings[1] = replace(recordings[1], head=replace(recordings[1].head, rank=2))
    recordings = [
        replace(
            each,
            events=[
                event._replace(peer=2 * event.peer) if isinstance(event, Collective) else event for event in each.events
            ],
        )
        for each in recordings
    ]
    ranks, groups = traces_of(*recordings)
    assert check_times(ranks) == 6_000_000 and groups == {}
    sent = [node.attributes for nodes in ranks for node in nodes if node.type == SEND]
    received = [node.attributes for nodes in ranks for node in nodes if node.type == RECEIVE]
    assert sent == received and [(each["comm_src"], each["comm_dst"]) for each in sent] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("host_s", [0.0, 0.3])
def test_messages_of_one_batch_start_together(host_s: float) -> None:
    both = (message("send", 1, 1), message("recv", 1, 3), message("send", 1, 1, batch=2), matmul(1, 1))
    others = (matmul(1, 0.5), message("recv", 0, 1), message("send", 0, 3), message("recv", 0, 1, batch=2))
    ranks, _ = traces_of(rank(0, *both), rank(1, *others), hardware=machine(host_s=host_s))
    check_times(ranks)
    tags = Counter((node.type, node.attributes["comm_tag"]) for node in ranks[0] if node.type in (SEND, RECEIVE))
    assert tags == {(SEND, 0): 1, (SEND, 1): 1, (RECEIVE, 0): 1}


def test_chakras_own_reader_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chakra_jsonizer` of mlc-chakra, with Google's protobuf and Chakra's own schema."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    jsonizer = pytest.importorskip("chakra.src.jsonizer.jsonizer", reason="mlc-chakra is not installed")
    groups = gather(0, 1, ranks=((2, 4),)), matmul(0, 2, "layers.0"), copy(0, 1, "to_host")
    recordings = [*two_stages()], [run(*groups, head=replace(HEAD, mesh={"dp_shard": 2, "tp": 4}))]
    for name, data in (file for each in recordings for file in chakra_files(simulations_of(each))):
        if not name.endswith(".et"):
            continue
        traces, text = tmp_path / name, tmp_path / "nodes.json"
        traces.write_bytes(data)
        words = ("--input_filename", str(traces), "--output_filename", str(text))
        monkeypatch.setattr("sys.argv", ["chakra_jsonizer", *words])
        jsonizer.main()
        metadata, *theirs = json.loads(f"[{text.read_text().replace('}{', '},{')}]")
        assert metadata == {"version": "0.0.4"}
        assert [*map(node_of_json, theirs)] == nodes_of(data)


def simulations_of(recordings: Sequence[Recording]) -> list[Simulation]:
    return Simulation.all_of(recordings, machine(host_s=0.25), False, ())


def node_of_json(record: dict[str, Any]) -> Node:
    """A node as protobuf writes it: numbers of 64 bits are text, a field that is 0 is missing."""
    numbers = {name: int(record.get(name, 0)) for name in ("id", "startTimeMicros", "durationMicros")}
    attributes = {}
    for each in record["attr"]:
        (value,) = (each.get(field) for field in each if field != "name")
        attributes[each["name"]] = value if TYPES[each["name"]] == "string_val" else int(value)
    deps = [*map(int, record.get("dataDeps", ()))]
    place = numbers["id"], record["name"], NODE_TYPES[record["type"]], deps
    return Node(*place, numbers["startTimeMicros"], numbers["durationMicros"], attributes)


def test_the_command_writes_a_new_folder(tmp_path: Path) -> None:
    recording, folder = tmp_path / "mine.jsonl", tmp_path / "traces"
    save_recordings([run(matmul(0, 1), gather(0, 1, ranks=((8, 1),))._replace(group_size=8))], recording)

    def simulate() -> Any:
        options = ("--recording", recording, "--results", tmp_path / "results", "--chakra", folder)
        return CliRunner().invoke(main, ["simulate", *map(str, options)])

    result = simulate()
    assert result.exit_code == 0 and f"Chakra traces: {folder} (9 files, " in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["comm_groups.json", *(f"mine.{n}.et" for n in range(8))]
    *_, multiplied, _, _, gathered = nodes_of((folder / "mine.7.et").read_bytes())
    assert multiplied.attributes["num_ops"] == 10**9 and json.loads((folder / "comm_groups.json").read_text()) == {
        gathered.attributes["pg_name"]: [*range(8)]
    }
    again = simulate()
    assert again.exit_code == 2 and "is not a new folder; give a new folder with --chakra" in again.stderr
    for path in folder.iterdir():
        path.unlink()
    irregular = gather(0, 1, ranks=((1, 0), (1, 3)))
    for wrong, expected in (
        (irregular, "the group of ranks 0, 3 is not along mesh dims"),
        (gather(0, 1)._replace(kind="barrier", op="c10d.barrier"), "Chakra has no type for barrier (c10d.barrier)"),
    ):
        save_recordings([run(matmul(0, 1), wrong)], recording)
        refused = simulate()
        assert refused.exit_code == 2 and expected in refused.stderr and not [*folder.iterdir()]
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
