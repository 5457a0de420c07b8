"""All four planners in one run under a profile: what each row says, against values worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, Cli, run_files
from processes import Ranks

from distbench.cases.redistribution import planners_of
from distbench.planning.cost_profile import Line, Profile
from distbench.records.run_file import read_run
from distbench.redistribute.expected_shards import Pair
from distbench.spec import Redistributions
from distbench.torch_private import Unsupported, native_all_to_all

PAIRS = f"{DATA / 'pairs.py'}::pairs"
TURNED, CUT, REDUCED, MOVED = "S(0)S(0)->S(1)S(1)", "RR->S(0)R", "P(sum)R->RR", "RS(0)->RS(1)"


def profile_of(backend: str = "gloo", tp: int = 2) -> Profile:
    """Bases tell the mesh dims and ops apart; a byte costs a nanosecond, a copied one two."""
    lines = [Line("direct", "dp_shardxtp", 2 * tp, 5.0, 1e-3, 1e-6)]
    for name, size, base_s in (("dp_shard", 2, 1.0), ("tp", tp, 10.0)):
        for number, op in enumerate(("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "all_to_all_native")):
            lines.append(Line(op, name, size, base_s * (1 + number), 1e-9, 2e-9))
    return Profile("test", backend, "2.13", {"dp_shard": 2, "tp": tp}, tuple(lines))


@pytest.fixture(scope="module")
def rows(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("planners")
    profile_of().save(folder / "profile.json")
    chosen = ("--profile", str(folder / "profile.json"), "--set", "planners=greedy+min_cost+calibrated+direct")
    done = ranks.run_here(
        "run", PAIRS, "--quick", "--budget", "0.5", "--device", "cpu", "--results", str(folder / "results"), *chosen
    )
    assert done.exit_code == 0, done.stderr
    (file,) = run_files(folder / "results")
    run = read_run(file)
    once = [record for record in run.cases if not record["case"]["id"].endswith("(baseline again)")]
    assert len({record["case"]["id"] for record in run.cases}) == len(run.cases) == 4 * 4 * 2 + 1
    assert run.header["job"]["profile"] == str(folder / "profile.json")
    params = [record["case"]["params"] for record in once]
    names = [(f"{param['source']}->{param['target']}", param["planner"]) for param in params]
    return dict(zip(names, once, strict=True))


@pytest.mark.long
def test_every_value_is_right(rows: dict[tuple[str, str], Any]) -> None:
    for (pair, planner), record in rows.items():
        assert record["status"] == "ok", record["error"]
        assert record["case"]["id"] == f"redistribute/f32[32,32]/{pair}/{planner}"
        assert record["case"]["params"]["native_all_to_all"] is planner.endswith("+native")


@pytest.mark.long
def test_direct_receives_the_lower_bound_and_stays_silent_where_the_target_is_local(
    rows: dict[tuple[str, str], Any],
) -> None:
    # 4096 bytes on 2x2. TURNED: 8 of 32 rows to 8 of 32 columns, 8x8 elements are there already: 1024 - 256 bytes.
    # MOVED: 16 rows to 16 columns, 16x16 are there: 2048 - 1024 bytes.
    for pair, bound, ops in ((TURNED, 768, "send_recv"), (MOVED, 1024, "send_recv"), (CUT, 0, "none")):
        record = rows[pair, "direct"]
        counters = record["counters"]
        assert counters["lower_bound_bytes"] == counters["received_bytes"] == record["wire_bytes"] == bound
        assert record["backend_op"] == ops and counters["num_collectives"] == (ops != "none")
        assert counters["lower_bound_ratio"] == (1.0 if bound else None)
    assert rows[REDUCED, "greedy"]["counters"]["lower_bound_bytes"] is None


@pytest.mark.long
def test_the_planners_of_a_pair_take_turns_and_each_keeps_its_path(rows: dict[tuple[str, str], Any]) -> None:
    counts = {key: len(record["passes"]) for key, record in rows.items() if record["status"] == "ok"}
    assert min(counts.values()) >= 8
    assert all(counts[pair, planner] == counts[pair, "greedy"] for pair, planner in counts if "+native" not in planner)
    assert {record["stop_reason"] for record in rows.values() if record["status"] == "ok"} == {"passes"}


@pytest.mark.long
def test_predictions_are_the_profiles_lines_added_up(rows: dict[tuple[str, str], Any]) -> None:
    predicted = {key: record["counters"].get("predicted_s") for key, record in rows.items()}
    assert predicted[REDUCED, "greedy"] == pytest.approx(2.0 + 4096e-9)
    # One all-to-all of 2048 local bytes over tp, one of whose tensor dims is not the first.
    assert predicted[MOVED, "greedy"] == pytest.approx(40.0 + 2048 * 3e-9)
    assert predicted[MOVED, "greedy+native"] == pytest.approx(50.0 + 2048 * 3e-9)
    # An all-gather over tp of 4096 bytes and a local cut are cheaper here, and the profile prices no cuts.
    assert predicted[MOVED, "calibrated"] == pytest.approx(10.0 + 4096e-9)
    # 1024 bytes arrive, and 2048 are written: twice as many.
    assert predicted[MOVED, "direct"] == pytest.approx(5.0 + 1024e-3 + 2 * 1024e-6)
    assert predicted[CUT, "direct"] == predicted[CUT, "greedy"] == 0.0


@pytest.mark.long
def test_a_row_says_whether_an_all_to_all_ran_as_one(rows: dict[tuple[str, str], Any]) -> None:
    assert rows[MOVED, "greedy"]["backend_op"] == "all_gather"
    assert rows[MOVED, "greedy+native"]["backend_op"] == "all_to_all"
    gathered, exchanged = (rows[MOVED, name]["counters"]["wire_bytes_executed"] for name in ("greedy", "greedy+native"))
    # Two ranks: each sends its 2048 bytes, or half of them.
    assert (gathered, exchanged) == (2048, 1024)


def test_without_names_a_profile_adds_our_planners_where_they_can_move_the_pair() -> None:
    sweep = Redistributions(shape=(8, 8), pairs=())
    shard, reduced = (Pair.of(source, "RR", (8, 8)) for source in ("S(0)R", "P(sum)R"))
    torchs = ["greedy", "min_cost"]
    assert planners_of(sweep, shard, None) == torchs
    assert planners_of(sweep, shard, profile_of()) == [*torchs, "calibrated", "direct"]
    assert planners_of(sweep, reduced, profile_of()) == [*torchs, "calibrated", "direct"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        (profile_of(backend="nccl"), "calibrate on gloo"),
        (profile_of(tp=4), "no all_gather over tp of 2 ranks; run distbench calibrate on this mesh"),
    ],
)
def test_a_profile_that_does_not_fit_is_one_sentence_before_any_rank_starts(
    cli: Cli, tmp_path: Path, content: str | Profile | None, message: str
) -> None:
    path, out = tmp_path / "profile.json", tmp_path / "results"
    if isinstance(content, Profile):
        content.save(path)
    elif content is not None:
        path.write_text(content)
    done = cli("run", PAIRS, "--device", "cpu", "--profile", str(path), "--results", str(out))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_the_native_all_to_all_is_put_back_and_refused_where_torch_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import placement_types

    before = placement_types.shard_dim_alltoall
    with pytest.raises(RuntimeError, match="inside"), native_all_to_all():
        assert placement_types.shard_dim_alltoall is not before
        raise RuntimeError("inside")
    assert placement_types.shard_dim_alltoall is before
    with native_all_to_all(enabled=False):
        assert placement_types.shard_dim_alltoall is before
    monkeypatch.delattr(placement_types, "shard_dim_alltoall")
    with pytest.raises(Unsupported, match="shard_dim_alltoall"), native_all_to_all():
        pass
