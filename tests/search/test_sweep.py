"""Sweeps as a command: what is refused, and one sweep that records real steps."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from processes import Children

from distbench.cli.main import main
from distbench.search import predicted as predicted_module
from distbench.search import sweep_child as sweep_child_module
from distbench.search.measured import claim_folder, keep_round, read_round, require_folder
from distbench.search.space import lower_bound_bytes, set_up
from distbench.search.sweep_child import Question, SweepChild
from distbench.spec import UserError
from distbench.spec.file_io import unique_stem


def sweep(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("llama_2d", "--memory", "lots", "--hardware", "h100"),
            "--memory lots is not valid; give a positive number",
        ),
        (
            ("llama_2d", "--memory", "2000TB", "--hardware", "h100"),
            "--memory 2000TB is too large; give at most 1e+06GB",
        ),
        (("llama_2d", "--max-time", "0"), "0 is too short; give at least 0.001 s"),
        (("llama_2d", "--price", "-1"), "--price"),
        (("llama_2d", "--world", "0"), "--world 0 is not a number of ranks"),
        (("llama_2d", "--memory", "80GB"), "--memory needs --hardware"),
        (("llama_2d", "--float8", "layers.*"), "--float8 needs --hardware"),
        (("llama_2d", "--mesh", "tp=2"), "--mesh needs --around-my-plan"),
        (("llama_2d", "--set", "plan.mesh=tp4"), "leave --set plan.mesh out"),
        (("llama3_8b", "--world", "64"), "too large for CPUs; predict with --hardware h100"),
        (("llama_2d", "--hardware", "h1000"), "--hardware 'h1000' is unknown"),
        (("llama_2d", "--hardware", ""), "--hardware '' is unknown"),
        (("llama_2d", "--mesh", "", "--around-my-plan"), "mesh part '' is not NAME=SIZE"),
        (("llama_2d", "--memory", "", "--hardware", "h100"), "--memory  is not valid"),
        (("lama_2d",), "no scenario 'lama_2d'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = sweep(*arguments, "--results", str(tmp_path))
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


@pytest.fixture(scope="module")
def predicted(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A sweep of three plans of a small scenario, and the same again from what it left."""
    out = tmp_path_factory.mktemp("sweep")
    requested = (
        "tp_mlp",
        "--quick",
        "--world",
        "2",
        "--hardware",
        "h100",
        "--plans",
        "3",
        "--results",
        str(out),
    )
    with children.forked():
        first = sweep(*requested, "--price", "2.5")
        kept = {file.name: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SweepChild, "_started", lambda _: pytest.fail("a finished sweep starts no process"))
            patch.setattr(predicted_module, "load_recordings", lambda _: pytest.fail("it reads no recording"))
            resumed = sweep(*requested, "--reuse", "--quiet", "--format", "json", "--page", str(out / "page.html"))
        small = sweep(*requested, "--reuse", "--memory", "1MB")
        with SweepChild(own_scenario(out.parent), "own") as child:
            (facts,) = child.answers(Question("facts", [{}], {"dp_shard": 2}))
            again = list(child.again)
            ((_, ended),) = child.ask([Question("facts", [{"often": True}], {"dp_shard": 2})])
        staged = sweep(
            *("pipeline", "--quick", "--set", "schedule=gpipe", "--set", "microbatches=4", "--set", "num_layers=2"),
            *("--world", "2", "--hardware", "h100", "--plans", "1", "--results", str(out.parent / "staged")),
        )
        served = sweep(
            *("llama_inference", "--quick", "--set", "phase=prefill", "--set", "fsdp=True", "--world", "2"),
            *("--set", "sequence_parallel=False", "--hardware", "h100", "--plans", "5"),
            *("--results", str(out.parent / "served"), "--format", "json"),
        )
    after = {file.name: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
    runs = {"served": served, "first": first, "again": resumed, "small": small, "staged": staged, "facts": facts}
    runs |= {"signals": again, "ended": ended}
    return {**runs, "kept": kept, "after": after, "out": out}


OWN = """
import os
import torch
from torch import nn
from distbench.spec import Scenario, scenario

def build():
    os.write(1, b"a library prints")
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

@scenario(mesh={"dp_shard": 2})
def own(*, often: bool = False) -> Scenario:
    if often or not os.path.exists("MARK"):
        open("MARK", "w").close()
        os.write(2, b"terminate called\\n")
        os.abort()
    return Scenario(
        build_model=build,
        make_batch=lambda: {"ids": torch.zeros(8, 3)},
        call=lambda model, batch: model(batch["ids"]).mean(),
        num_tokens=lambda batch: batch["ids"].numel(),
        parallelize=lambda model, mesh: None,
        optimizer=torch.optim.AdamW,
    )
"""


def own_scenario(folder: Path) -> Path:
    """A scenario that writes to standard output, whose batch is a dict, whose function shards what it likes, and whose
    first process is aborted."""
    file = folder / "own.py"
    file.write_text(OWN.replace("MARK", str(folder / "mark")))
    return file


@pytest.mark.long
def test_a_function_that_shards_what_it_likes_rules_no_mesh_out(predicted: Mapping[str, Any]) -> None:
    facts = predicted["facts"]
    assert (facts["batch_size"], facts["num_tokens"], facts["optimizer_share"]) == (8, 24, 2.0)
    # 2 layers of 4 x 4 + 4 numbers of 4 bytes, over all 4 ranks at best; gradients nobody knows before it has run.
    assert lower_bound_bytes(facts, {"dp_shard": 2, "tp": 2}) == 2 * 20 * 4 / 4


def test_a_process_that_a_signal_ends_is_started_once_more(predicted: Mapping[str, Any]) -> None:
    assert predicted["signals"] == ["ended by SIGABRT (its last words: terminate called)"]
    assert "ended by SIGABRT (its last words: terminate called), second attempt" in predicted["ended"]["left_out"]


def test_a_child_that_ends_at_once_is_one_sentence(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def ended(*command: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = start(*command, **options)
        process.wait()
        return process

    monkeypatch.setattr(sweep_child_module, "CHILD", "no_such_module")
    monkeypatch.setattr(sweep_child_module.subprocess, "Popen", ended)
    (tmp_path / "own.py").write_text(OWN)
    with SweepChild(tmp_path / "own.py", "own") as child, pytest.raises(UserError, match="No module named"):
        child.answers(Question("facts", [{}], {"dp_shard": 2}))


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    mine = set_up("tp_mlp", (), 2, None, True)
    claim_folder(tmp_path, mine)
    require_folder(tmp_path, mine, True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for arguments, message in (
        (("fsdp_stack", "--world", "2"), "contains a sweep of tp_mlp"),
        (("tp_mlp", "--world", "4"), "contains a sweep of tp_mlp"),
    ):
        for resume in ((), ("--reuse",)):
            done = sweep(*arguments, *resume, "--quick", "--hardware", "h100", "--results", str(tmp_path))
            assert done.exit_code == 2 and message in done.output, done.output
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_resume_of_no_sweep_is_refused(tmp_path: Path) -> None:
    done = sweep("tp_mlp", "--reuse", "--results", str(tmp_path / "missing"))
    assert done.exit_code == 2 and "contains no sweep" in done.output and not (tmp_path / "missing").exists()


@pytest.mark.parametrize("record", [{"labels": None}, {"run_file": 3, "labels": [], "code": "x"}, [], None, {}])
def test_a_damaged_round_is_one_sentence(record: Any, tmp_path: Path) -> None:
    (tmp_path / "round-1.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"round-1.json cannot be used: .*; delete this file"):
        read_round(tmp_path / "round-1.json", "x")


def test_a_round_of_other_code_is_measured_again(tmp_path: Path) -> None:
    keep_round(tmp_path / "round-1.json", tmp_path / "run.jsonl", ["a"], "x")
    assert read_round(tmp_path / "round-1.json", "x") == (tmp_path / "run.jsonl", ["a"])
    assert read_round(tmp_path / "round-1.json", "y") is None and read_round(tmp_path / "round-2.json", "x") is None


def test_launches_of_one_second_have_names_of_their_own() -> None:
    # Of 16 random bits 20,000 names have about 2,600 twice.
    assert len({unique_stem(0.0, "nogit", "mine") for _ in range(20_000)}) == 20_000


def test_a_sweep_ends_with_a_plan_to_paste_and_a_picture(predicted: Mapping[str, Any]) -> None:
    first = predicted["first"]
    assert first.exit_code == 0, first.output
    answer = " ".join(" ".join(first.stdout.splitlines()[-10:]).split())
    assert "Recommended: " in answer and "(predicted on h100)" in answer and "MFU" in answer
    assert "plan = ParallelPlan(" in first.stdout and "Next: distbench run tp_mlp --mesh " in answer
    assert "at 2.5 per device-hour" in answer
    for name in ("plans.png", "plans.svg", "plans.json"):
        assert (predicted["out"] / name).stat().st_size > 500


def test_a_resumed_sweep_records_nothing_again(predicted: Mapping[str, Any]) -> None:
    assert predicted["again"].exit_code == 0, predicted["again"].output
    record = json.loads(predicted["again"].stdout)
    assert record["plans"] and record["plans"][0]["step_s"] > 0
    assert predicted["after"] == predicted["kept"]
    # A page begins with what it is for.
    page = (predicted["out"] / "page.html").read_text()
    assert page.index('class="verdict"') < page.index(record["recommendation"]) < page.index("<svg")


def test_memory_that_no_plan_fits_is_one_sentence(predicted: Mapping[str, Any]) -> None:
    done = predicted["small"]
    assert done.exit_code == 2 and "no plan of tp_mlp" in done.output and "fits into 1.00 MB" in done.output


def test_meshes_of_a_pipeline_are_predicted_too(predicted: Mapping[str, Any]) -> None:
    assert predicted["staged"].exit_code == 0, predicted["staged"].output


def test_plans_of_inference_are_predicted_without_gradients(predicted: Mapping[str, Any]) -> None:
    served = predicted["served"]
    assert served.exit_code == 0, served.output
    record = json.loads(served.stdout)
    changes = {name for plan in record["plans"] for name in plan["changes"]}
    assert changes and not changes & {"plan.microbatches", "plan.checkpoint", "plan.prefetch", "plan.loss"}
