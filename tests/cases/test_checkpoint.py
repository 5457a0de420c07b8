"""Checkpoints of a step on one gloo rank: exact round trips, changed files, and folders that cannot be used."""

import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distbench.cases.checkpoint import CheckpointFailed, _first_difference, checkpoint_cases
from distbench.ranks.case_protocol import CaseSpec
from distbench.ranks.context import RankContext
from distbench.records.dataframe import frame_of
from distbench.report.checkpoints import SECTION
from distbench.report.section_protocol import ReportedRun
from distbench.spec import Checkpoints, FsdpPlan, ParallelPlan, PipelinePlan, Scenario, UserError


@pytest.fixture
def context() -> Iterator[RankContext]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    assert dist.group.WORLD is not None
    yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 0)
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def scenario(checkpoints: Checkpoints, **fields: Any) -> Scenario:
    given: dict[str, Any] = {
        "build_model": Model,
        "make_batch": lambda: (torch.randn(4, 64), torch.randn(4, 8)),
        "loss": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.AdamW, lr=0.1),
        "plan": ParallelPlan(fsdp=FsdpPlan(wrap=("first",))),
    }
    return Scenario(**{**given, **fields}, checkpoints=(checkpoints,))


def cases(context: RankContext, *ways: str, folder: Path | None = None, **fields: Any) -> dict[str, CaseSpec]:
    declared = scenario(Checkpoints(ways=ways, folder=str(folder or "")), **fields)
    return {spec.case.params["op"]: spec for spec in checkpoint_cases(declared, "mine", context)}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_save_is_equal_to_the_state_before_the_step_that_runs_meanwhile(
    context: RankContext, tmp_path: Path, way: str
) -> None:
    spec = cases(context, way, folder=tmp_path)[f"save {way}"]
    stamps: list[int] = []
    with spec.open() as opened:
        opened.call(lambda: stamps.append(1))
        assert len(stamps) == len(opened.phases) == 2
        assert opened.check() is None
        # 64 x 64 + 64 + 8 x 64 + 8 values, for the model and two moments, in f32.
        assert opened.after()["state_bytes"] > 3 * 4680 * 4
    assert list(tmp_path.iterdir()) == []


def test_a_load_restores_what_was_overwritten(context: RankContext, tmp_path: Path) -> None:
    with cases(context, folder=tmp_path)["load"].open() as opened:
        opened.call(lambda: None)
        assert opened.check() is None


@pytest.mark.parametrize("op", ["save sync", "load"])
def test_a_loaded_value_that_differs_in_one_bit_is_wrong(
    context: RankContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    plain = dcp.load

    def load(state: Any, **options: Any) -> None:
        plain(state, **options)
        state["model"]["first.bias"].to_local().view(torch.int32)[3] ^= 1

    monkeypatch.setattr(dcp, "load", load)
    with cases(context, "sync", folder=tmp_path)[op].open() as opened:
        wrong = opened.check()
    assert wrong is not None and wrong.startswith("1 of ") and wrong.endswith("model.first.bias")


def test_values_that_are_not_equal_to_themselves_and_signs_of_zero_are_compared_by_their_bits() -> None:
    state = {"a": torch.tensor([torch.nan, 0.0]), "b": [1, {"c": torch.tensor(2)}]}
    assert _first_difference(state, state) is None
    other = {**state, "a": torch.tensor([torch.nan, -0.0])}
    assert "1 of 3 loaded values" in str(_first_difference(other, state))
    assert "a is in only one" in str(_first_difference({"b": state["b"]}, state))


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_file_that_cannot_be_written_whole_is_one_sentence(
    context: RankContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with cases(context, way, folder=tmp_path)[f"save {way}"].open() as opened:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(CheckpointFailed) as raised:
                opened.call(lambda: None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = str(raised.value)
    assert text.count("\n") == 0 and "on rank 0: File too large" in text and "folder=" in text


def test_a_folder_with_other_files_is_refused(context: RankContext, tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(UserError, match=r"folder .* is not empty; give another folder"):
        cases(context, "sync", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_folder_that_cannot_be_made_is_refused(context: RankContext, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: .*; give another folder"):
        cases(context, "sync", folder=tmp_path / "file" / "folder")


def test_hosts_without_a_shared_folder_are_refused(context: RankContext) -> None:
    with pytest.raises(UserError, match="need a folder that all hosts share"):
        cases(replace(context, hosts=("a", "b")), "sync")


@pytest.mark.parametrize(
    ("checkpoints", "fields", "words"),
    [
        (Checkpoints(ways=("later",)), {}, "way 'later' is unknown; use sync, async, async_process"),
        (Checkpoints(load_meshes=("dp_shard2",)), {}, "Checkpoints.load_meshes=dp_shard2 has 2 ranks, but the launch"),
        (Checkpoints(load_meshes=("4",)), {}, "Checkpoints.load_meshes=4 is not a mesh"),
        (Checkpoints(), {"build_model": None}, "need a model"),
        (Checkpoints(), {"plan": ParallelPlan(pipeline=PipelinePlan())}, "do not support a pipeline"),
    ],
)
def test_declarations_that_cannot_work_are_one_sentence(
    context: RankContext, checkpoints: Checkpoints, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        list(checkpoint_cases(scenario(checkpoints, **fields), "mine", context))


def test_the_table_has_blocked_and_total_time_and_bandwidth() -> None:
    def case(op: str, target: str, **fields: Any) -> dict[str, Any]:
        params = {"scenario": "mine", "variant": "", "op": op, "source": "dp_shard=4", "target": target}
        record = {"case": {"id": op, "kind": "checkpoint", "params": params}, "status": "ok", "samples_s": [2.0]}
        return {**record, "counters": {"state_bytes": 1 << 30}, **fields}

    phases = {"phases_s": {"blocked": [0.5], "background": [1.5]}}
    run: Any = SimpleNamespace(
        cases=[case("save async", "", **phases), case("load", "dp_shard=2,tp=2")],
        path=Path(os.devnull),
        about=SimpleNamespace(scenario="mine", mesh=None, settings={}, environment=SimpleNamespace(machine="here")),
    )
    reported = ReportedRun(run, frame_of([run]))
    (table,) = SECTION.tables(reported, True)
    save, load = ([*row] for row in table.rows)
    assert save[:1] + save[2:] != load and "500" in " ".join(save) and "512 MiB/s" in save and "dp_shard=2,tp=2" in load
    assert [*SECTION.headline(reported)] == ["save of 1 GiB blocks the step for: async 500 ms of 2.00 s"]
