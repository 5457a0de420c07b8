"""`calibrate --from`: made-up files of nccl-tests whose rates are known, run files, and files that are no use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import run_files
from nccl_files import OF_NCCL, SIZES, TRUE_HOP_S, TRUTH, nccl_file, true_s
from processes import Ranks

from distbench.cli.main import main
from distbench.planning.cost_profile import DIRECT, NATIVE_ALL_TO_ALL, Profile, Sample, fit_line, load_profile
from distbench.planning.redistribution_request import setting_of
from distbench.simulate.hardware_file import Hardware, load_hardware
from distbench.simulate.operator_costs import link_s
from distbench.spec import Settings
from distbench.spec.errors import UserError


def calibrate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["calibrate", "--from", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    """The one sentence of a refused command, which writes nothing."""
    done = calibrate(*arguments)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Profile, Hardware, Path]:
    """Four collectives on 4 and 8 devices of a node, one of each of two nodes, and all of 2 and 4 nodes."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "files").mkdir()
    for on_hosts in ((8,), (4,), (1, 1), (8, 8), (8,) * 4):
        for op in OF_NCCL:
            nccl_file(folder / "files" / f"{op}-{len(on_hosts)}x{on_hosts[0]}.json", op, on_hosts)
    profile, hardware = folder / "profile.json", folder / "hardware.json"
    done = calibrate(folder / "files", "--base", "h100", "-o", profile, "--hardware-out", hardware)
    assert done.exit_code == 0, done.stderr
    return done, load_profile(profile), load_hardware(str(hardware)), folder


def test_the_rates_behind_files_of_nccl_tests_are_found(cluster: tuple[Result, Profile, Hardware, Path]) -> None:
    _, profile, hardware, _ = cluster
    for name, value in TRUTH.items():
        assert hardware[name] == pytest.approx(value, rel=0.03), name
    assert hardware["network_hop_s"] == pytest.approx(TRUE_HOP_S, rel=0.2)
    base = load_hardware("h100")
    assert hardware["matmul_bf16_flops"] == base["matmul_bf16_flops"]
    assert hardware.figures["node_base_s"].basis == "measured"
    assert "all_gather-1x4.json" in hardware.figures["node_base_s"].source
    assert hardware.figures["peer_bytes_per_s"] == base.figures["peer_bytes_per_s"], "no file has sendrecv"
    for line in profile.lines:
        op = {"all_to_all": "alltoall"}.get(line.op, line.op)
        on_hosts = [int(count) for count in line.hosts.split("+")]
        for size in SIZES:
            assert line.seconds(size) == pytest.approx(true_s(op, on_hosts, size), rel=0.05)
            assert link_s(line.op, size, sum(on_hosts), on_hosts, hardware) == pytest.approx(
                true_s(op, on_hosts, size), rel=0.05
            )
        assert line.error < 0.03 and line.held_out_error is not None and line.held_out_error < 0.05
        assert line.worst_error < 0.08
        copies = 0 if line.op == "all_reduce" else 2 / (base["memory_bytes_per_s"] * base["memory_share"])
        assert line.per_copied_byte_s == pytest.approx(copies)


def test_the_errors_are_printed_by_collective_and_group(cluster: tuple[Result, Profile, Hardware, Path]) -> None:
    done, *_ = cluster
    assert (
        "network_bytes_per_s  47.0 GB/s" in done.stdout and "peer_bytes_per_s      180 GB/s          -" in done.stdout
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("all_to_all      8+8 ")]
    assert [row[2] for row in rows] == ["21"] and len(rows[0]) == 9
    assert "warning" not in done.stderr, done.stderr


def test_a_profile_of_files_is_planned_with(cluster: tuple[Result, Profile, Hardware, Path]) -> None:
    _, profile, _, folder = cluster
    assert (dict(profile.mesh), len(profile.hosts)) == ({"dp_shard": 32}, 32)
    for mesh in ("dp_shard=16", "dp_shard=2,tp=8", "tp=4", "dp_shard=32"):
        setting_of("512,512", "f32", mesh, folder / "profile.json")
    with pytest.raises(UserError, match=r"the profile has prices for mesh dims .* tp of 4, tp of 8, but not"):
        setting_of("512,512", "f32", "tp=6", folder / "profile.json")


def test_one_number_of_nodes_splits_base_and_hop_as_the_base(tmp_path: Path) -> None:
    files = [nccl_file(tmp_path / f"{op}.json", op, (8,) * 4) for op in ("all_gather", "reduce_scatter")]
    done = calibrate(*files, "--base", "h100", "--only", "hardware", "--hardware-out", tmp_path / "h.json")
    assert done.exit_code == 0, done.stderr
    hardware, base = load_hardware(str(tmp_path / "h.json")), load_hardware("h100")
    num_hops = 2 * (1 + 7 * 1.9 / 4)  # two further nodes, of eight ranks each
    fixed_s = hardware["network_base_s"] + num_hops * hardware["network_hop_s"]
    assert fixed_s == pytest.approx(TRUTH["network_base_s"] + num_hops * TRUE_HOP_S, rel=0.03)
    ratios = [hardware[name] / base[name] for name in ("network_base_s", "network_hop_s")]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-3)
    again = ("--base", tmp_path / "h.json", "--only", "hardware", "--hardware-out", tmp_path / "h.json")
    assert "h.json is the base, which is not overwritten" in refusal(*files, *again)


def test_rings_and_messages_are_of_sendrecv(tmp_path: Path) -> None:
    def at(rate: float) -> Callable[[dict[str, Any]], None]:
        def change(data: dict[str, Any]) -> None:
            for row in data["results"]:
                row["out_of_place"] = {"time": 10 + row["size"] / rate * 1e6, "bus_bw": None}

        return change

    files = [
        nccl_file(tmp_path / f"{size}.json", "sendrecv", (size,), change=at(rate))
        for size, rate in ((2, 1.7e11), (8, 1.5e11))
    ]
    assert "give --only hardware" in refusal(*files, "--base", "h100", "-o", tmp_path / "p.json")
    done = calibrate(*files, "--base", "h100", "--only", "hardware", "--hardware-out", tmp_path / "h.json")
    assert done.exit_code == 0, done.stderr
    hardware = load_hardware(str(tmp_path / "h.json"))
    assert hardware["peer_bytes_per_s"] == pytest.approx(1.7e11) and hardware["ring_bytes_per_s"] == pytest.approx(
        1.5e11
    )
    assert hardware["node_bytes_per_s"] == load_hardware("h100")["node_bytes_per_s"]


def without_hosts(data: dict[str, Any]) -> None:
    for device in data["config"]["devices"]:
        del device["hostname"]


def test_groups_are_as_the_files_state_them(tmp_path: Path) -> None:
    def split(data: dict[str, Any]) -> None:
        for device in data["config"]["devices"]:
            device["group"] = device["rank"] % 8

    def reversed_rows(data: dict[str, Any]) -> None:
        data["results"].reverse()

    output = tmp_path / "p.json"
    calibrate(nccl_file(tmp_path / "split.json", on_hosts=(8, 8), change=split), "-o", output)
    (line,) = load_profile(output).lines
    assert (line.mesh_dim, line.group_size, line.hosts) == ("dp_shard", 2, "1+1")
    plain = nccl_file(tmp_path / "plain.json", change=without_hosts)
    assert "plain.json does not state the hosts of its 8 ranks; give --devices-per-node N" in refusal(
        plain, "-o", output
    )
    calibrate(plain, "--devices-per-node", "4", "-o", output)
    assert load_profile(output).lines[0].hosts == "4+4"
    forward, backward = (
        nccl_file(tmp_path / f"{change.__name__}.json", change=change) for change in (dict, reversed_rows)
    )
    calibrate(forward, "-o", output)
    expected = load_profile(output).lines[0]
    calibrate(backward, "-o", output)
    assert load_profile(output).lines[0].parameters == pytest.approx(expected.parameters)


@pytest.mark.parametrize(
    ("message", "more", "of_file"),
    [
        ("slow.json and a.json contradict each other: all_reduce in groups of 8 takes 2.00x as long in slow.json "
         "(median of 21 sizes)", [{"factor": 2.0}], {}),
        ("dtype f32 is fitted; left out: bf16; -k bf16 fits bf16", [{"dtype": "bfloat16"}], {}),
        ("left out: 2 results with the size and placement", [],
         {"change": lambda data: data["results"].append(data["results"][0])}),
        ("a.json: left out: 1 result (the first: a time is not above 0 s", [],
         {"change": lambda data: data["results"][4]["out_of_place"].update(time="12.5")}),
        ("left out: gather; usable are all_gather", [{"change": lambda data: data.update(args=["gather_perf"])}], {}),
        ("tp of 6 does not divide a mesh of 8 ranks", [{"on_hosts": (6,)}], {}),
        ("tp of 8 lacks all_gather, all_to_all, reduce_scatter, which redistribute needs", [], {}),
        ("give --base NAME", [], {}),
    ],
)  # fmt: skip
def test_what_is_left_out_or_doubtful_is_stated(
    tmp_path: Path, message: str, more: list[dict[str, Any]], of_file: dict[str, Any]
) -> None:
    files = [nccl_file(tmp_path / "a.json", noise=0, **of_file)]
    files += [nccl_file(tmp_path / "slow.json", noise=0, **one) for one in more]
    done = calibrate(*files, "-o", tmp_path / "p.json")
    assert done.exit_code == 0, done.stderr
    assert any(message in line for line in done.stderr.splitlines() if line.startswith("warning: ")), done.stderr
    assert "Next: distbench redistribute" not in done.stdout, "the profile lacks collectives"


@pytest.mark.parametrize(
    ("message", "of_file"),
    [
        ("needs samples of two sizes, but has 1); measure more sizes", {"sizes": [1 << 20]}),
        ("has a time that is 1,000x shorter than its own bus bandwidth shows",
         {"change": lambda data: data["results"][9]["out_of_place"].update(
             time=data["results"][9]["out_of_place"]["time"] / 1000)}),
        ("a.json has 8 ranks on one host, more than --devices-per-node 4", {"options": ("--devices-per-node", "4")}),
        ("has 9 ranks on one host, but h100 has 8 devices per node", {"on_hosts": (9,), "options": ("--base", "h100")}),
        ("left out: 21 results of one rank, or of unknown ranks", {"change": lambda data: data.update(config={})}),
        ("groups of 1 and 7 ranks", {"change": lambda data: data["config"]["devices"][0].update(group=1)}),
        ("size is 'lots', not a whole number", {"change": lambda data: data["results"][0].update(size="lots")}),
        ("is not a file of nccl-tests", {"change": lambda data: data.clear()}),
        ("left out: 21 results (the first: 3 elements are wrong)",
         {"change": lambda data: [row["out_of_place"].update(nwrong=3.0) for row in data["results"]]}),
        ("times do not increase with the size",
         {"change": lambda data: [row["out_of_place"].update(time=9.0, bus_bw=None) for row in data["results"]],
          "options": ("--base", "h100")}),
        ("--base 'h1000' is unknown (nearest: h100", {"options": ("--base", "h1000")}),
        ("--only hardware needs device rates with --from; give --base NAME", {"options": ("--only", "hardware")}),
        ("--quick cannot be combined with --from", {"options": ("--quick",)}),
        ("--hardware-out has no effect without --base", {"options": ("--hardware-out", "x.json")}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_use_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, of_file: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = nccl_file(tmp_path / "a.json", **{name: given for name, given in of_file.items() if name != "options"})
    assert message in refusal(file, *of_file.get("options", ()))
    assert not list(tmp_path.glob("*profile*")) and not list(tmp_path.glob("*hardware*"))


def test_folders_without_a_use_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert "has no readable run file and no file of nccl-tests" in refusal(tmp_path)
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere")
    assert "no run file under" in refusal("last", "--results", tmp_path)
    done = CliRunner().invoke(main, ["calibrate", "x.json"])
    assert done.exit_code == 2 and "has no effect without --from" in done.stderr
    other = nccl_file(
        tmp_path / "other.json", change=lambda data: data["config"]["devices"][0].update(device_info="A100")
    )
    assert "2 devices: A100 (other.json) and NVIDIA H100 (a.json)" in refusal(other, nccl_file(tmp_path / "a.json"))


def test_a_run_of_collectives_becomes_a_profile(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Settings(warmup_iterations=1, min_samples=6, max_samples=20, budget_s=0.5)
    monkeypatch.setattr(Settings, "quick", lambda: few)
    results = ("--results", str(tmp_path))
    done = ranks.run_here("run", "collectives", "--quick", "--mesh", "dp_shard=1,tp=2", "--device", "cpu", *results)
    assert done.exit_code == 0, done.stderr
    output = tmp_path / "profile.json"
    done = calibrate("last", *results, "-o", output)
    assert done.exit_code == 0 and "--mesh dp_shard=1,tp=2" in done.stdout, done.stderr
    profile = load_profile(output)
    ops = {"all_gather", "all_to_all", NATIVE_ALL_TO_ALL, "all_reduce", "reduce_scatter"}
    assert {line.op for line in profile.lines} == ops and profile.line(DIRECT, "dp_shardxtp", 2) is None
    assert {(line.mesh_dim, line.group_size, line.hosts) for line in profile.lines} == {("tp", 2, "2")}
    gather, instead = (profile.line(op, "tp", 2) for op in ("all_gather", "all_to_all"))
    assert gather is not None and instead is not None and len(gather.samples) == 3
    assert instead.seconds(1e5) == pytest.approx(gather.seconds(2e5)), "DTensor on gloo gathers the whole tensor"
    (file,) = run_files(tmp_path)
    assert file.name in profile.source and profile.backend == "gloo"
    assert "is simulated" not in done.stderr and "give --base NAME" in done.stderr


def run_file(path: Path, cases: list[dict[str, Any]], mesh: dict[str, int], **environment: Any) -> Path:
    """A run file of distbench with these cases."""
    header = {"type": "run", "schema_version": 2, "run_id": path.stem, "job": {"scenario": "x", "mesh": mesh}}
    about = {"machine": "m", "backend": "gloo", "torch": "2.13", "device": "cpu", "hosts": ["m"] * 4, **environment}
    lines = [header | {"environment": about}, *({"type": "case", "status": "ok", **one} for one in cases)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def timed(kind: str, op: str, size: int, seconds: float, **params: Any) -> dict[str, Any]:
    of_case = {"op": op, "mesh_dim": "tp", "dtype": "f32", **params}
    return {
        "case": {"id": f"{kind}/{op}/{size}", "kind": kind, "params": of_case},
        **{"samples_s": [seconds, seconds * 3, seconds / 3], "payload_bytes": size, "group_size": 4, "mesh_dim": "tp"},
        "counters": {"num_copies": 0},
    }


def test_steps_of_a_calibration_replace_collectives_alone(tmp_path: Path) -> None:
    sizes = [4096, 65536, 1 << 20]
    alone = [timed("collective", op, size, 1e-4 + size * 1e-9) for op in ("all_gather", "all_reduce") for size in sizes]
    steps = [timed("calibrate", "all_gather", size, 5e-4 + size * 2e-9, held_out=size == 65536) for size in sizes]
    mesh = {"tp": 4}
    files = [run_file(tmp_path / "a.jsonl", alone, mesh), run_file(tmp_path / "b.jsonl", steps, mesh)]
    done = calibrate(*files, "-o", tmp_path / "p.json")
    assert done.exit_code == 0, done.stderr
    profile = load_profile(tmp_path / "p.json")
    gather, reduce = (profile.line(op, "tp", 4) for op in ("all_gather", "all_reduce"))
    assert gather is not None and gather.base_s == pytest.approx(5e-4) and gather.held_out_error is not None
    assert (
        reduce is not None and reduce.base_s == pytest.approx(1e-4) and "without DTensor's own time" in profile.source
    )
    other = run_file(tmp_path / "c.jsonl", alone, mesh, machine="other")
    assert "the files come from 2 machines: m (a.jsonl) and other (c.jsonl)" in refusal(*files, other)
    broken = run_file(tmp_path / "d.jsonl", [{**alone[0], "group_size": None}], mesh)
    assert "has a collective without the fields of distbench" in refusal(broken)


@pytest.mark.parametrize(
    ("share", "times_us", "median", "worst", "worst_of_bent"),
    [
        # All-reduce on 8 GPUs, 32 KiB to 32 MiB: https://github.com/kvcache-ai/Mooncake/pull/3484.
        (1.75, (18.66, 18.95, 19.25, 19.54, 20.39, 27.76, 40.66, 53.24, 81.16, 121.33, 195.40), 0.06, 0.23, 0.13),
        # Reduce-scatter on 8 GPUs, 64 KiB to 256 MiB: https://github.com/NVIDIA/nccl-tests/issues/128.
        (0.875, (33.50, 48.62, 81.99, 88.70, 106.2, 152.5, 252.5, 461.2, 885.2, 1737.1, 3461.9, 6913.0, 13882.0),
         0.02, 0.36, 0.09),
    ],
)  # fmt: skip
def test_lines_of_published_tables_are_off_as_the_docs_state(
    share: float, times_us: tuple[float, ...], median: float, worst: float, worst_of_bent: float
) -> None:
    first = 15 if share == 1.75 else 16
    samples = [Sample(share * 2 ** (first + row), 0, time * 1e-6) for row, time in enumerate(times_us)]
    straight = fit_line("times", "node", 1, samples, is_straight=True)
    assert (round(straight.error, 2), round(straight.worst_error, 2)) == (median, worst)
    assert round(fit_line("all_reduce", "tp", 8, samples).worst_error, 2) == worst_of_bent
