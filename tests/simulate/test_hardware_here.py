"""A hardware file of this machine: what is fitted, how a step is replayed on a host, and what the file may hold."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chakra_reader import check_times, nodes_of
from test_simulate_clock import replay_time

from distbench.cases.calibration import compute_cases
from distbench.planning.cost_profile import Sample
from distbench.planning.measured_collectives import Group, Timing
from distbench.records.run_file import Run, read_run
from distbench.show.blocks import Table
from distbench.simulate.chakra_trace import chakra_files
from distbench.simulate.clock import parts_of
from distbench.simulate.hardware_file import Curve, Hardware, load_hardware
from distbench.simulate.measured_hardware import hardware_text, write_hardware
from distbench.simulate.measured_links import base_hardware, write_links
from distbench.simulate.recording import Allocated, Collective, Event, Head, Operator, Recording, StepBegun
from distbench.simulate.simulation import Simulation
from distbench.spec import Scenario
from distbench.spec.errors import UserError

# The machine that is to be found again: 50 GFLOP/s, 10 GB/s, collectives of 1 ms and 1 GB/s, and what the host takes.
FLOPS, BANDWIDTH, BASE_S, BUS = 50e9, 10e9, 1e-3, 1e9
OPERATOR_S, FSDP_S, REDISTRIBUTION_S, LISTED_S = 5e-5, 2e-3, 3e-3, 2e-5
OPTIMIZER_REDISTRIBUTION_S = 1e-3
# Operators take as many times longer in a step: in one whole step, in the other, and their geometric mean.
FACTORS, FACTOR = (2.0, 1.125), 1.5
BF16_FACTOR = 1.2  # of bf16 matmuls
FAULTS_S = 5e-10  # of page faults per byte
MEGA = 1 << 20


def operator(kind: str, amount: int, phase: str = "forward", name: str = "aten.x", listed: int = 1) -> Operator:
    flops, num_bytes = (0, amount) if kind == "memory" else (amount, 1)
    return Operator(0, name, kind, flops, "f32", num_bytes, [(1, 1)] * listed, [], phase, "")


def collective(kind: str, payload: int, source: str, group_size: int = 4, phase: str = "forward") -> Collective:
    moved = "" if source == "fsdp" else "S(0)->R"
    return Collective(
        0, phase, source, kind, "tp", group_size, "f32", payload, "", True, moved, None, [(group_size, 1)]
    )


def step(variant: str, *events: Event) -> Recording:
    head = Head("calibrate_steps", variant, {"tp": 4}, "2.13", 10, 4, None, 1, ("forward", "backward", "optimizer"))
    return Recording(head, [StepBegun(1), StepBegun(2), *events])


def gathered_s(payload: int) -> float:
    return BASE_S + payload / BUS


STEPS = {
    "host": (
        *[operator("memory", MEGA)] * 40,
        collective("all_gather", MEGA, "fsdp"),
        operator("memory", 6 * MEGA, "optimizer", "aten._foreach_add_", listed=6),
    ),
    "host_fsdp": (*[operator("memory", MEGA)] * 60, *[collective("all_gather", MEGA, "fsdp")] * 9),
    "host_tp": (
        *[operator("matmul", 10**8)] * 50,
        *[collective("all_gather", MEGA, "tp")] * 8,
        *[collective("all_gather", MEGA, "tp", phase="optimizer")] * 3,
    ),
    "whole": (operator("matmul", 10**9), *[collective("all_gather", 4 * MEGA, "fsdp")] * 2),
    "whole_bf16": (operator("matmul", 10**9)._replace(dtype="bf16"), operator("matmul", 10**9)),
    "whole_tp": (operator("matmul", 2 * 10**9), collective("all_gather", MEGA, "tp")),
}
# By hand, from the machine above: what is not the optimizer's, and what is.
PHASES_S = {
    "host": (
        40 * (OPERATOR_S + MEGA / BANDWIDTH) + FSDP_S + gathered_s(MEGA),
        6 * (LISTED_S + MEGA / BANDWIDTH),
    ),
    "host_fsdp": (60 * (OPERATOR_S + MEGA / BANDWIDTH) + 9 * (FSDP_S + gathered_s(MEGA)), 0.0),
    "host_tp": (
        50 * (OPERATOR_S + 10**8 / FLOPS) + 8 * (REDISTRIBUTION_S + gathered_s(MEGA)),
        3 * (OPTIMIZER_REDISTRIBUTION_S + gathered_s(MEGA)),
    ),
    # Collectives and the host take in a step what they were found to take.
    "whole": (OPERATOR_S + FACTORS[0] * 10**9 / FLOPS + 2 * (FSDP_S + gathered_s(4 * MEGA)), 0.0),
    "whole_bf16": (2 * OPERATOR_S + (BF16_FACTOR + FACTOR) * 10**9 / FLOPS, 0.0),
    "whole_tp": (OPERATOR_S + FACTORS[1] * 2 * 10**9 / FLOPS + REDISTRIBUTION_S + gathered_s(MEGA), 0.0),
}


def run_of(cases: list[dict[str, Any]]) -> Run:
    environment = {
        **{"machine": "m", "cpu_model": "a CPU", "num_cpus": 2, "memory_bytes": 16 << 30},
        **{"backend": "gloo", "torch": "2.13", "world_size": 4, "device": "cpu"},
    }
    header = {"run_id": "r", "environment": environment, "job": {"mesh": {"tp": 4}}}
    return Run(Path("x.jsonl"), header, cases, None, [])


def measured(what: str, amount: int, seconds: float, **params: Any) -> dict[str, Any]:
    # Ten in one call; the median of the samples is what counts.
    return {
        "case": {"id": f"{what}{amount}{params}", "kind": "compute", "params": {"what": what, **params}},
        **{"status": "ok", "group_size": params.get("group_size", 4)},
        **{"counters": {"amount": amount, "repeats": 10}, "samples_s": [10 * seconds, 90 * seconds, seconds]},
    }


def operators_run() -> Run:
    cases = []
    for amount in (10**6, 10**8, 10**10):
        for what in ("matmul_f32", "matmul_bf16", "attention", "attention_backward"):
            cases.append(measured(what, amount, amount / FLOPS))
    cases += [measured("memory", amount, amount / BANDWIDTH) for amount in (1 << 16, 1 << 20, 1 << 24)]
    cases.append(measured("new_block", 64 * MEGA, 64 * MEGA * (1 / BANDWIDTH + FAULTS_S)))
    for payload in (4096, MEGA, 4 * MEGA, 32 * MEGA):
        cases.append(measured("collective", payload, gathered_s(payload), op="all_gather", group_size=4))
    return run_of(cases)


def steps_run(phases: Mapping[str, tuple[float, float]] = PHASES_S) -> Run:
    cases = []
    for part, (own, optimizer) in phases.items():
        params = {"variant": f"part={part}"}
        # Of each phase the slowest rank, which is another one: together more than the slowest rank's step.
        phases_s = {
            name: [1.25 * seconds] * 3
            for name, seconds in (("forward", own / 3), ("backward", own * 2 / 3), ("optimizer", optimizer))
        }
        cases.append(
            {
                "case": {"id": part, "kind": "step", "params": params},
                **{"status": "ok", "phases_s": phases_s, "samples_s": [own + optimizer] * 3},
            }
        )
    return run_of(cases)


def recordings() -> list[Recording]:
    return [step(f"part={part}", *events) for part, events in STEPS.items()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "here.json"
    write_hardware(path, operators_run(), steps_run(), recordings())
    return path


@pytest.fixture(scope="module")
def hardware(file: Path) -> Hardware:
    return load_hardware(str(file))


def test_the_machine_that_made_the_runs_is_found(hardware: Hardware) -> None:
    assert hardware.host is not None and hardware.host.num_ranks == 4
    wanted = {
        **{"operator_s": OPERATOR_S, "fsdp_s": FSDP_S, "redistribution_s": REDISTRIBUTION_S},
        **{"optimizer_redistribution_s": OPTIMIZER_REDISTRIBUTION_S, "listed_s": LISTED_S},
        **{"operator_factor": FACTOR, "step_factor": 1.0},
        **{"matmul_bf16_factor": BF16_FACTOR, "page_faults_s_per_byte": FAULTS_S},
    }
    assert hardware.host.figures == pytest.approx(wanted, rel=0.01)
    assert hardware["matmul_f32_flops"] == pytest.approx(FLOPS, rel=0.01)
    assert hardware["node_bytes_per_s"] == pytest.approx(0.75 * 32 * MEGA / gathered_s(32 * MEGA), rel=0.01)
    assert hardware.of_basis("fitted") == {} and set(hardware.of_basis("guess")) == {
        *("network_bytes_per_s", "network_base_s", "network_hop_s"),
    }


def test_rows_of_a_calibration_are_read(tmp_path: Path) -> None:
    """As they are written to a run file, one host's and several hosts': a reader that checks fields left some out."""
    for hosts in (("one",) * 4, ("one", "one", "two", "two")):
        device = SimpleNamespace(type="cpu")
        given: Any = SimpleNamespace(
            mesh=SimpleNamespace(size=lambda: 4), mesh_dims=("tp",), hosts=hosts, device=device
        )
        specs = [spec.case for spec in compute_cases(Scenario(compute=1), given)]
        rows = [{"type": "case", "case": asdict(case), "status": "ok", "samples_s": [1.0]} for case in specs]
        file = tmp_path / "run.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in ({"type": "run", "schema_version": 2}, *rows)))
        assert len(specs) > 10 and len(read_run(file).cases) == len(specs)


def test_a_host_runs_one_thing_after_another(hardware: Hardware) -> None:
    """Also what is on different streams; each with the host's own time before it, the factor over operators alone."""
    apart = operator("matmul", 10**8)._replace(stream=3)
    given = step("", apart, collective("all_gather", MEGA, "fsdp"), apart)
    timed = replay_time(given, hardware)
    host_s = 2 * OPERATOR_S + FSDP_S
    compute_s, gather_s = FACTOR * 2 * 10**8 / FLOPS, gathered_s(MEGA)
    assert timed.host_s == pytest.approx(host_s, rel=0.01)
    assert timed.step_s == pytest.approx(host_s + compute_s + gather_s, rel=0.01)
    parts = parts_of(timed)
    assert parts.compute_s == pytest.approx(compute_s, rel=0.01)
    assert sum(parts.exposed_s.values()) == pytest.approx(gather_s, rel=0.01)
    (_, trace), *_ = chakra_files([Simulation(given, hardware)])
    nodes = nodes_of(trace)
    assert check_times([nodes]) == round(1e6 * timed.step_s)
    assert [len(node.deps) for node in nodes] == [
        0,
        1,
        1,
        2,
        1,
        2,
    ]


def test_large_blocks_are_mapped_page_by_page(hardware: Hardware) -> None:
    def step_s(num_bytes: int) -> float:
        block = Allocated(1, num_bytes, 0, "activations", "")
        return replay_time(step("", block, operator("memory", MEGA)), hardware).step_s

    assert step_s(40 * MEGA) - step_s(16 * MEGA) == pytest.approx(40 * MEGA * FAULTS_S, rel=0.01)
    assert step_s(16 * MEGA) == step_s(MEGA)


def test_the_one_factor_of_older_files_is_over_all(file: Path, tmp_path: Path) -> None:
    record = json.loads(file.read_text())
    figures = record["host"]["figures"]
    figures["step_factor"] = figures.pop("operator_factor")
    del figures["matmul_bf16_factor"]
    older = tmp_path / "older.json"
    older.write_text(json.dumps(record))
    given = step("", operator("matmul", 10**8), collective("all_gather", MEGA, "fsdp"))
    parts_s = OPERATOR_S + 10**8 / FLOPS + FSDP_S + gathered_s(MEGA)
    assert replay_time(given, load_hardware(str(older))).step_s == pytest.approx(FACTOR * parts_s, rel=0.01)


def test_an_optimizer_goes_through_its_lists_one_by_one(hardware: Hardware) -> None:
    """torch takes foreach on accelerators, which is what is recorded, and a loop on CPU."""
    one = replay_time(step("", operator("memory", MEGA, "optimizer", "aten._foreach_mul_")), hardware).step_s
    many = operator("memory", 12 * MEGA, "optimizer", "aten._foreach_mul_", listed=12)
    assert replay_time(step("", many), hardware).step_s == pytest.approx(12 * one, rel=0.01)


def test_dtensors_all_to_all_is_an_all_gather_of_the_whole(hardware: Hardware) -> None:
    whole = replay_time(step("", collective("all_gather", 4 * MEGA, "tp")), hardware).step_s
    assert replay_time(step("", collective("all_to_all", MEGA, "tp")), hardware).step_s == pytest.approx(whole)
    nobody = collective("all_gather", MEGA, "fsdp", group_size=1)
    assert replay_time(step("", nobody), hardware).step_s == 0


def test_the_host_dispatches_collectives_of_dtensor_only(hardware: Hardware) -> None:
    by_dtensor = collective("all_gather", MEGA, "tp")
    events = by_dtensor, by_dtensor._replace(phase="optimizer"), by_dtensor._replace(redistribution="")
    times = [replay_time(step("", event), hardware).step_s - gathered_s(MEGA) for event in events]
    assert times == pytest.approx([REDISTRIBUTION_S, OPTIMIZER_REDISTRIBUTION_S, FSDP_S], rel=0.01)


def test_a_cost_without_a_measurement_is_left_out(tmp_path: Path) -> None:
    """An optimizer without collectives: those of other optimizers then cost as much as the model's, not 0."""
    events = {**STEPS, "host_tp": STEPS["host_tp"][:-3]}
    phases = {**PHASES_S, "host_tp": (PHASES_S["host_tp"][0], 0.0)}
    path, recorded = tmp_path / "here.json", [step(f"part={part}", *given) for part, given in events.items()]
    host = write_hardware(path, operators_run(), steps_run(phases), recorded).host
    assert host is not None and host["optimizer_redistribution_s"] == pytest.approx(REDISTRIBUTION_S, rel=0.01)


def test_older_files_have_one_figure_for_dtensors_collectives(file: Path, tmp_path: Path) -> None:
    record = json.loads(file.read_text())
    del record["host"]["figures"]["optimizer_redistribution_s"]
    older = tmp_path / "older.json"
    older.write_text(json.dumps(record))
    given = step("", collective("all_gather", MEGA, "tp", phase="optimizer"))
    wanted_s = REDISTRIBUTION_S + gathered_s(MEGA)
    assert replay_time(given, load_hardware(str(older))).step_s == pytest.approx(wanted_s, rel=0.01)


@pytest.mark.parametrize(
    ("queries", "is_causal", "share"), [(512, 1, 1.0), (64, 1, 1.0), (4096, 1, 0.5625), (512, 0, 0.5)]
)
def test_causal_attention_computes_whole_blocks(queries: int, is_causal: int, share: float, hardware: Hardware) -> None:
    """Torch's attention on CPUs computes 512 keys at once, also those that a mask excludes."""
    short = operator("attention", 10**9)
    given = short._replace(attention=(queries, queries, is_causal))
    times = [replay_time(step("", event), hardware).step_s - OPERATOR_S for event in (given, short)]
    assert times[0] / times[1] == pytest.approx(share, rel=0.01)


def test_ddps_buckets_cost_their_host_an_operator_and_may_be_reduced_beside_others(hardware: Hardware) -> None:
    bucket = collective("all_gather", MEGA, "ddp")
    assert replay_time(step("", bucket), hardware).step_s == pytest.approx(OPERATOR_S + gathered_s(MEGA), rel=0.01)
    assert any("during backward" in message for message in Simulation(step("", bucket), hardware).not_simulated)


def test_what_was_not_measured_is_said(hardware: Hardware) -> None:
    small = step("", operator("matmul", 10**9), collective("all_gather", MEGA, "fsdp"))
    assert not any("extrapolated" in text or "DDP" in text for text in Simulation(small, hardware).not_simulated)
    large = step(
        "",
        operator("matmul", 10**11),
        collective("all_gather", 64 * MEGA, "fsdp"),
        collective("all_reduce", 64 * MEGA, "fsdp", 2),
    )
    other = Recording(Head(**{**large.head.__dict__, "mesh": {"tp": 8}}), large.events)
    message = "\n".join(Simulation(other, hardware).not_simulated)
    assert "measured with 4 ranks on this machine, but this step has 8" in message
    assert "matmul_f32 above 1e+10 operations, the largest measured amount" in message
    assert "all_gather above 3.36e+07 bytes" in message
    assert "all_reduce in unmeasured groups of 2, from groups of 4" in message


def test_between_points_and_beyond_them() -> None:
    curve = Curve(((100.0, 1.0), (10_000.0, 4.0)), has_floor=True)
    # Halfway on logarithmic scales: ten times the amount, twice the time.
    assert [curve.seconds(amount) for amount in (1, 1000, 20_000)] == pytest.approx([1, 2, 8])
    assert Curve(curve.points).seconds(50) == pytest.approx(0.5)


def test_the_table_fits_a_terminal(hardware: Hardware) -> None:
    text = hardware_text(hardware)
    assert max(map(len, text.splitlines())) <= 100
    assert "1.50x slower" in text and "50.0 GFLOP/s" in text


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("host",), 3, "host is 3, not an object"),
        (("host", "num_ranks"), 0, "host.num_ranks is 0, not a whole number above 0"),
        (("host", "figures", "fsdp_s"), None, "host.figures.fsdp_s is missing"),
        (
            ("host", "figures", "operator_factor", "value"),
            40,
            "host.figures.operator_factor.value is 40, not a number from 0.1",
        ),
        (
            ("host", "figures", "operator_facter"),
            {"value": 1, "basis": "guess", "source": "here"},
            "host.figures.operator_facter is unknown (nearest: operator_factor",
        ),
        (("host", "operators", "memory"), [[2, 1], [1, 2]], "host.operators.memory has 2 points, but not with"),
        (("host", "operators", "matmul_f64"), [[1, 1]], "host.operators.matmul_f64 is unknown"),
        (("host", "collectives"), {}, "host.collectives is an object of 0, not a list"),
        (("host", "collectives", 0, "kind"), "gather", "host.collectives[0].kind is"),
        (("host", "collectives", 0, "points"), [[1, -1]], "host.collectives[0].points[0][1] is -1, not seconds"),
        (("host", "collectives"), [], "host.collectives lacks all_gather"),
    ],
)
def test_what_no_machine_is_like_is_one_sentence(
    file: Path, tmp_path: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    record = json.loads(file.read_text())
    part = record
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(record))
    with pytest.raises(UserError) as raised:
        load_hardware(str(damaged))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_absurd_measurements_make_no_file(tmp_path: Path) -> None:
    slow, hasty = {**PHASES_S, "whole": (100.0, 0.0)}, {**PHASES_S, "whole_tp": (1e-9, 0.0)}
    path = tmp_path / "here.json"
    for absurd in (slow, hasty):
        with pytest.raises(UserError, match=r"operator_factor.value is .* on an idle machine"):
            write_hardware(path, operators_run(), steps_run(absurd), recordings())
    with pytest.raises(UserError, match="has no step host_fsdp; measure with distbench calibrate"):
        write_hardware(path, operators_run(), steps_run({"host": PHASES_S["host"]}), recordings())
    collectives = [one for one in operators_run().cases if one["case"]["params"]["what"] != "collective"]
    with pytest.raises(UserError, match="has no all_gather of all 4 ranks; measure with distbench calibrate"):
        write_hardware(path, run_of(collectives), steps_run(), recordings())
    with pytest.raises(UserError, match="has no matmul_f32; measure with distbench calibrate"):
        write_hardware(path, run_of([]), steps_run(), recordings())
    assert not path.exists()


def test_runs_replace_the_curves_of_collectives_alone(file: Path, tmp_path: Path) -> None:
    """`calibrate --from` with this machine's file as base: twice the rate, and a kind that the base lacks."""
    group = {kind: Group(kind, "tp", 4, "4") for kind in ("all_gather", "all_reduce")}
    sizes = [4096 * 4**number for number in range(8)]
    timings = [
        Timing(of, "f32", Sample(size, 0, BASE_S + size / BUS / 2), "x") for of in group.values() for size in sizes
    ]
    written = tmp_path / "links.json"
    (table,) = write_links(written, *base_hardware(str(file)), timings, None, 4)
    base, measured = load_hardware(str(file)).host, load_hardware(str(written)).host
    assert base is not None and measured is not None
    assert (measured.operators, measured.figures) == (base.operators, base.figures)
    assert measured.collectives["all_reduce", 4].seconds(sizes[3]) == pytest.approx(
        BASE_S + sizes[3] / BUS / 2, rel=1e-3
    )
    # Fitted points are met; held-out sizes are interpolated.
    assert isinstance(table, Table)
    assert [row[:5] for row in table.rows] == [(kind, "4", "8", "0 %", "0 %") for kind in group]
    with pytest.raises(UserError, match="the largest run has 2 ranks, but --base m was measured with 4"):
        write_links(written, *base_hardware(str(file)), timings, None, 2)
