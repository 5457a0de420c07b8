"""How groups lie on hosts, and which line of a profile prices them there; expected values are worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from distbench.launch.job_request import check_profile, hosts_of_ranks
from distbench.launch.rendezvous import Joined
from distbench.planning.cost_profile import COLLECTIVES, Line, Profile, load_profile, measured_cost, profile_on
from distbench.report.calibrations import profile_text
from distbench.spec import Calibration, Scenario
from distbench.spec.errors import UserError
from distbench.spec.mesh import ACROSS, PARTLY, RAIL, WITHIN, dim_shape, flattened, level_of, mesh_shapes

TWO_HOSTS = ("a",) * 4 + ("b",) * 4
SECONDS = {"1+1": 8.0, "4": 1.0, "2": 0.5, "2+2": 6.0}


def profile_of(mesh: dict[str, int], hosts: tuple[str, ...], extra: tuple[str, ...] = ()) -> Profile:
    """Every collective takes SECONDS of its shape."""
    shapes = {name: shape for name, shape in mesh_shapes(mesh, hosts).items() if name in mesh}
    named = [*((name, mesh[name], shape) for name, shape in shapes.items()), *((one, 0, one) for one in extra)]
    lines = [
        Line(op, name, size or sum(map(int, shape.split("+"))), SECONDS[shape], 0.0, hosts=shape)
        for op in COLLECTIVES
        for name, size, shape in named
    ]
    return Profile("lab", "gloo", "2.13", mesh, tuple(lines), "made up", hosts)


@pytest.mark.parametrize(
    ("mesh", "hosts", "shapes"),
    [
        ({"dp": 2, "tp": 4}, TWO_HOSTS, {"dp": "1+1", "tp": "4", "dpxtp": "4+4"}),
        ({"dp": 4, "tp": 2}, TWO_HOSTS, {"dp": "2+2", "tp": "2", "dpxtp": "4+4"}),
        ({"pp": 2, "dp": 2, "tp": 2}, TWO_HOSTS, {"pp": "1+1", "dp": "2", "tp": "2", "ppxdpxtp": "4+4"}),
        # Of (0,1), (2,3), (4,5) the second crosses from host a to host b.
        ({"dp": 3, "tp": 2}, ("a",) * 3 + ("b",) * 3, {"dp": "2+1", "tp": "2|1+1", "dpxtp": "3+3"}),
    ],
)
def test_how_the_groups_of_a_mesh_lie(mesh: dict[str, int], hosts: tuple[str, ...], shapes: dict[str, str]) -> None:
    assert mesh_shapes(mesh, hosts) == shapes


def test_levels_in_words() -> None:
    assert [level_of(shape) for shape in ("4", "1+1+1", "2+2", "2|1+1", "")] == [WITHIN, RAIL, ACROSS, PARTLY, ""]


def test_what_other_meshes_consist_of() -> None:
    assert {shape for shape, _, _ in flattened({"dp": 2, "tp": 4}, TWO_HOSTS)} == {"2", "2+2", "4+4"}
    for shape, size, stride in flattened({"dp": 2, "tp": 4}, TWO_HOSTS):
        groups = [range(start, start + size * stride, stride) for start in range(8) if start // stride % size == 0]
        assert dim_shape(groups, TWO_HOSTS) == shape
    # 64 hosts of 8: within one 2, 4 (8 is tp's own), over all of them 2, 4 and 8 of each (1 of each is dp's own).
    hosts = tuple(f"h{rank // 8}" for rank in range(512))
    assert len(flattened({"dp": 64, "tp": 8}, hosts)) == 2 + 3


def seconds(profile: Profile, mesh: dict[str, int], hosts: tuple[str, ...] = ()) -> list[float]:
    model = measured_cost(profile_on(profile, mesh, hosts), mesh)
    return [model.seconds("all_gather", mesh_dim, 1.0, 0) for mesh_dim in range(len(mesh))]


def test_a_profile_prices_other_meshes_on_its_hosts_by_shape_and_not_by_name() -> None:
    measured = profile_of({"dp": 2, "tp": 4}, TWO_HOSTS, ("2", "2+2"))
    assert seconds(measured, {"dp": 2, "tp": 4}) == [8.0, 1.0]
    # The same names the other way round: dp within a host, tp across.
    assert seconds(measured, {"tp": 4, "dp": 2}) == [6.0, 0.5]
    assert seconds(measured, {"pp": 2, "cp": 2, "tp": 2}) == [8.0, 0.5, 0.5]
    # Half of the ranks are one host, whatever dp was before.
    assert seconds(measured, {"dp": 2, "tp": 2}) == [0.5, 0.5]


def test_groups_that_cross_here_and_there_cost_what_crossing_costs() -> None:
    measured = profile_of({"dp": 2, "tp": 4}, TWO_HOSTS, ("2",))
    line = measured.of_shapes({"cp": 2}, {"cp": "2|1+1"}).line("all_gather", "cp", 2)
    assert line is not None and line.seconds(1.0) == 8.0


def test_a_line_of_its_own_shape_is_taken_before_one_that_some_groups_of_its_name_have() -> None:
    """Of a mesh dim that crossed here and there, a line costs what crossing does; this one stays within hosts."""
    crossing = Line("all_gather", "tp", 2, 8.0, 0.0, hosts="2|1+1")
    within = Line("all_gather", "2", 2, 0.5, 0.0, hosts="2")
    for lines, base_s in (((crossing, within), 0.5), ((crossing,), 8.0)):
        measured = Profile("lab", "gloo", "2.13", {"dp": 3, "tp": 2}, lines, "made up", ("a",) * 3 + ("b",) * 3)
        line = measured.of_shapes({"tp": 2}, {"tp": "2"}).line("all_gather", "tp", 2)
        assert line is not None and line.seconds(1.0) == base_s


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(
            ("line", odd, r"hosts is .*, not ranks of a group")
            for odd in ("four", "4+", "-4", "0", "2||2", "2 + 2", 4, "٤")
        ),
        ("line", "2+1", r"hosts is '2\+1', which does not describe groups of 2 ranks"),
        ("line", "2|4", "which does not describe groups of 2 ranks"),
        ("head", ["a", "b"], "hosts has 2 entries, but mesh has 8 ranks, each with one host"),
    ],
)
def test_levels_that_cannot_be_are_said(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = tmp_path / "p.json"
    profile_of({"dp": 2, "tp": 4}, TWO_HOSTS).save(path)
    record = json.loads(path.read_text())
    (record if field == "head" else record["lines"][0])["hosts"] = value
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        load_profile(path)


def test_a_profile_of_one_host_is_refused_on_two() -> None:
    measured = profile_of({"dp": 2, "tp": 4}, ("a",) * 8)
    with pytest.raises(
        UserError, match=r"8 ranks on one host and has no line for dp, .* 8 ranks on 2 hosts \(4 each\) .*\(1\+1"
    ):
        profile_on(measured, {"dp": 2, "tp": 4}, TWO_HOSTS)


def test_a_run_is_refused_before_ranks_start_where_its_profile_is_of_other_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mesh = tmp_path / "p.json", {"dp": 2, "tp": 4}
    profile_of(mesh, TWO_HOSTS).save(path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    joined = Joined(0, 8, {})
    assert hosts_of_ranks(8, joined) == ("host 0",) * 4 + ("host 1",) * 4
    check_profile(path, mesh, "cpu", hosts_of_ranks(8, joined))
    with pytest.raises(
        UserError, match=r"on 2 hosts \(4 each\) and has no line for dp, .* 8 ranks on one host .*within"
    ):
        check_profile(path, mesh, "cpu", hosts_of_ranks(8, None))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert hosts_of_ranks(8, joined) == ()


def test_a_profile_that_knows_no_hosts_goes_by_name() -> None:
    measured = profile_of({"dp": 2, "tp": 4}, TWO_HOSTS)
    unknown = replace(
        measured, hosts=(), lines=tuple(msgspec.structs.replace(line, hosts="") for line in measured.lines)
    )
    assert unknown.on({"tp": 4, "dp": 2}, TWO_HOSTS) == unknown


def test_hosts_survive_the_file_and_stand_in_the_table(tmp_path: Path) -> None:
    measured = profile_of({"dp": 2, "tp": 4}, TWO_HOSTS)
    measured.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == measured
    assert f"1+1: {RAIL}" in profile_text(measured)
    assert RAIL not in profile_text(profile_of({"dp": 2, "tp": 4}, ("a",) * 8))


def test_a_device_mesh_and_its_parts_are_priced_as_they_lie() -> None:
    from distbench.torch_private import fake_ranks
    from distbench.torch_private.calibrated_planner import _cost_of
    from distbench.torch_private.mesh import group_shapes

    measured = profile_of({"dp": 2, "tp": 4}, TWO_HOSTS, ("2",))
    with fake_ranks({"tp": 4, "dp": 2}) as mesh:
        assert group_shapes(mesh, ("tp", "dp"), TWO_HOSTS) == {"tp": "2+2", "dp": "2"}
        part = _cost_of(measured, mesh["dp"])
        assert part is not None and part.seconds("all_gather", 0, 1.0, 0) == 0.5
        assert _cost_of(measured, mesh) is None


def test_on_several_hosts_every_shape_of_group_is_calibrated() -> None:
    import torch

    from distbench.cases.calibration import calibration_cases
    from distbench.ranks.context import RankContext
    from distbench.torch_private import fake_ranks

    with fake_ranks({"dp_shard": 2, "tp": 4}) as mesh:
        world = torch.distributed.group.WORLD
        assert world is not None
        context = RankContext(0, torch.device("cpu"), mesh, "fake", world, seed=0, hosts=TWO_HOSTS)
        cases = list(calibration_cases(Scenario(calibrations=(Calibration((65536,)),)), context))
    over = {case.case.params["mesh_dim"] for case in cases if case.case.params["op"] == "all_gather"}
    assert over == {"dp_shard", "tp", "2", "2+2", "4+4"}
