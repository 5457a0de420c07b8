"""tokens/s where the scenario says what its tokens are, samples/s where it does not; from the scenario to the table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

from distbench.cases.step import step_cases
from distbench.ranks.context import RankContext
from distbench.records.dataframe import frame_of
from distbench.records.run_file import read_run
from distbench.report import render
from distbench.spec import ParallelPlan, Scenario, UserError


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    assert dist.group.WORLD is not None
    yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
    dist.destroy_process_group()


def params_of(num_tokens: Any, context: RankContext) -> dict[str, Any]:
    scenario = Scenario(
        build_model=lambda: nn.Linear(5, 5),
        make_batch=lambda: (torch.ones(6, 7, 5), torch.ones(6, 7, 5)),
        loss=nn.functional.mse_loss,
        num_tokens=num_tokens,
        plan=ParallelPlan(tp={"": ColwiseParallel()}),
    )
    [spec] = step_cases(scenario, "mine", context)
    return spec.case.params


def test_tokens_are_the_scenarios_word_and_nobody_elses(context: RankContext) -> None:
    assert params_of(42, context)["num_tokens"] == 42
    unsaid = params_of(None, context)
    assert unsaid["batch_size"] == 6 and "num_tokens" not in unsaid


@pytest.mark.parametrize("given", [0, -3, lambda batch: 1.5])
def test_tokens_that_are_no_count_are_refused(context: RankContext, given: Any) -> None:
    with pytest.raises(UserError, match="give the number of tokens of a global batch"):
        params_of(given, context)


@pytest.mark.parametrize("given", [1.5, True, "8"])
def test_tokens_that_are_no_whole_number_are_refused_where_they_are_declared(given: Any) -> None:
    with pytest.raises(TypeError, match=r"num_tokens is .*; give a whole number or a function or None"):
        Scenario(num_tokens=given)


def run_file(folder: Path, version: int, *params: dict[str, Any]) -> Path:
    lines: list[dict[str, Any]] = [{"type": "run", "schema_version": version, "job": {"scenario": "mine"}}]
    for number, own in enumerate(params):
        case = {"id": f"step/{number}", "kind": "step", "params": {"variant": f"v={number}", **own}}
        lines.append({"type": "case", "case": case, "status": "ok", "samples_s": [0.5] * 8, "phases_s": {}})
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_row_of_the_step_table_has_the_rate_that_is_known(tmp_path: Path) -> None:
    path = run_file(tmp_path, 2, {"batch_size": 8, "num_tokens": 5210}, {"batch_size": 8}, {})
    lines = render((path,), tmp_path, "table", None, (), full=True).text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("v=0"))
    assert "10.4 k tokens/s" in lines[first]
    assert "16 samples/s" in lines[first + 1] and "/s" not in lines[first + 2]


def test_what_an_older_file_took_for_tokens_is_not_said(tmp_path: Path) -> None:
    frame = frame_of([read_run(run_file(tmp_path, 1, {"num_tokens": 64, "shape": [4, 16]}, {"num_tokens": 64}))])
    assert frame["tokens_per_s"].isna().all()
    assert frame["samples_per_s"][0] == 8 and frame["samples_per_s"].isna()[1]
