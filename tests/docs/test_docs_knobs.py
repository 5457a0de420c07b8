"""docs/parallelism-options.md: fields of plans with a scenario for each; docs/torch_options.toml: torch's own."""

import dataclasses
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ROOT

from distbench.spec import (
    CompilePlan,
    CpPlan,
    DdpPlan,
    Entry,
    FsdpPlan,
    LargestDim,
    ParallelPlan,
    PipelinePlan,
    ShardParam,
    list_entries,
)
from distbench.spec.job import KNOBS, parse_choices
from distbench.spec.mesh import parse_mesh
from distbench.spec.plan import ATTENTION_KERNELS
from distbench.spec.scenario import Scenario
from distbench.spec.versions import OLDEST, release
from distbench.torch_private.probe import LOWEST

ENTRIES = {entry.name: entry for entry in list_entries()}
PLANS = (ParallelPlan, DdpPlan, FsdpPlan, CpPlan, CompilePlan, ShardParam, LargestDim, PipelinePlan)
# Values of parameters that are no axes, as a header lists those.
FURTHER_KNOBS = (
    "own_group",
    "two_buffers",
    "unused_zeros",
    "sum",
    "group_memory",
    "symm_mem",
    "kept_storage",
    "f32_norms",
)
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "kernel": ATTENTION_KERNELS,
    "causal": (True, False),
    "bf16": (True, False),
    "async_tp": (True, False),
    "knob": (*FURTHER_KNOBS, "bucket_list", "fp16_hook", "lazy_buckets"),
    "option": ("active_stages", "lookahead", "per_edge"),
    "defer_recv": (True, False),
    **{name: KNOBS[name].values for name in ("plan.reduce_scatter_group",)},
    "checkpoint": ("selective",),
    "inside": ("fsdp", "tp"),
    "plan.compile": KNOBS["plan.compile"].values,
    "plan.loss": KNOBS["plan.loss"].values,
}


TABLE = (ROOT / "docs" / "parallelism-options.md").read_text().partition("\n## ")[0]


def shown() -> list[tuple[str, str, str, str]]:
    """Return (option, fields, scenario, its values and mesh) of each row of the table of options."""
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in re.findall(r"^\| .*", TABLE, re.M)[1:]]
    return [(option, fields, *re.match(r"`(\w+)` ?(.*)", by).groups()) for option, fields, by in rows]  # type: ignore[union-attr,misc]


ROWS = shown()
TORCH = tomllib.loads((ROOT / "docs" / "torch_options.toml").read_text())
FIELDS = {f"{plan.__name__}.{field.name}" for plan in (*PLANS, Scenario) for field in dataclasses.fields(plan)}


def choices(cell: str, entry: Entry) -> dict[str, list[object]]:
    return parse_choices([text for text in re.findall(r"`([^`]+)`", cell) if "--mesh" not in text], entry.params)


@pytest.mark.parametrize(("knob", "fields", "scenario", "values"), ROWS, ids=[row[0] for row in ROWS])
def test_a_knob_names_fields_of_a_plan_and_a_scenario_that_has_such_values(
    knob: str, fields: str, scenario: str, values: str
) -> None:
    entry = ENTRIES[scenario]
    for name, given in choices(values, entry).items():
        assert set(given) <= {*entry.axes.get(name, ()), *OTHER_VALUES.get(name, ())}, f"{knob}: {name}"
    for mesh in re.findall(r"`--mesh ([^`]+)`", values):
        assert set(parse_mesh(mesh)) <= set(entry.mesh)
    named = re.findall(r"`([^`]+)`", fields)
    assert named and set(named) <= FIELDS


def test_every_field_of_a_plan_is_in_the_table() -> None:
    message = " ".join(fields for _, fields, _, _ in ROWS)
    for plan in PLANS:
        for field in dataclasses.fields(plan):
            assert f"`{plan.__name__}.{field.name}`" in message


@pytest.mark.parametrize(
    "scenario", [name for name, entry in ENTRIES.items() if entry.axes and {"tp", "cp", "fsdp"} & set(entry.tags)]
)
def test_every_value_of_every_axis_of_a_plan_is_in_the_table(scenario: str) -> None:
    entry = ENTRIES[scenario]
    message = [choices(values, entry) for _, _, name, values in ROWS if name == scenario]
    for axis, values in entry.axes.items():
        # The three-dimensional plan rotates as attention alone does, in a row of its own.
        if (scenario, axis) != ("llama_3d", "rotate"):
            listed = {value for one in message for value in one.get(axis, [])}
            assert set(values) <= listed <= {*values, *OTHER_VALUES.get(axis, ())}, axis


Option = tuple[str, str]
VERSION_KEYS = {"since": OLDEST, "until": (99, 0)}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}


def options_of_torch() -> set[Option]:
    """Return (owner, option) for each method and parameter by which this torch sets up what a plan describes."""
    import torch.distributed.fsdp._fully_shard as fsdp
    import torch.distributed.tensor.experimental._context_parallel as cp
    import torch.distributed.tensor.parallel as tp
    from torch.distributed import config, pipelining
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.nn.parallel import DistributedDataParallel

    by_name = {name: value for name, value in vars(schedules).items() if name.startswith("Schedule")}
    walked = {
        "torch.distributed.fsdp": set(fsdp.__all__),
        "FSDPModule": public(vars(fsdp.FSDPModule)),
        "fully_shard": parameters(fsdp.fully_shard),
        "MixedPrecisionPolicy": parameters(fsdp.MixedPrecisionPolicy),
        "CPUOffloadPolicy": parameters(fsdp.CPUOffloadPolicy),
        "DistributedDataParallel": public(vars(DistributedDataParallel)) | parameters(DistributedDataParallel),
        "torch.distributed.tensor.parallel": set(tp.__all__),
        "parallelize_module": parameters(tp.parallelize_module),
        "context parallel": set(cp.__all__),
        "context_parallel": parameters(cp.context_parallel),
        "_cp_options": set(vars(cp._cp_options)),
        "torch.distributed.pipelining": set(pipelining.__all__),
        "pipeline schedules": set(by_name),
        "methods of schedules": public({name for schedule in by_name.values() for name in dir(schedule)}),
        "parameters of schedules": {name for schedule in by_name.values() for name in parameters(schedule)},
        "PipelineStage": parameters(PipelineStage),
        "torch.distributed.config": {name for name in vars(config)["_config"] if name.startswith("pipeline_")},
    }
    # The first parameter of a setter is the value of its option.
    setters = {name: setter for name, setter in vars(fsdp.FSDPModule).items() if name.startswith("set_")}
    walked |= {name: set([*inspect.signature(setter).parameters][2:]) for name, setter in setters.items()}
    return {(owner, option) for owner, options in walked.items() for option in options}


Versions = tuple[tuple[int, int], tuple[int, int]]


def documented_options() -> dict[Option, Versions]:
    """Return the first and last torch version of each option in the two lists; an option is in one of them, once."""
    since: dict[Option, Versions] = {}
    for row in TORCH["set"] + TORCH["left_out"]:
        assert row["options"] and (row.get("field") or row.get("instead"))
        for option in row["options"]:
            assert (row["torch"], option) not in since
            first, last = (release(row[key]) if key in row else other for key, other in VERSION_KEYS.items())
            since[row["torch"], option] = (first, last)
    return since


def differences(version: tuple[int, int]) -> set[Option]:
    """Return what the installed torch has and the lists lack, or the lists state of that version and torch lacks."""
    since = documented_options()
    return options_of_torch() ^ {option for option, (first, last) in since.items() if first <= version <= last}


def test_torch_has_just_the_options_that_the_lists_state_for_its_version() -> None:
    assert not differences(release(torch.__version__))


def test_options_of_newer_torches_are_unsupported_below_the_version_that_the_list_states() -> None:
    stated = {
        option: release(row["since"])
        for row in TORCH["set"]
        if ".configure" in row["field"] and "since" in row
        for option in row["options"]
    }
    assert len(stated) > 10 and {option: LOWEST.get(option) for option in stated} == stated


def test_fields_that_set_torchs_options_exist() -> None:
    for row in TORCH["set"]:
        named = re.findall(r"`([^`]+)`", row["field"])
        assert named and set(named) <= FIELDS, row["options"]


def with_parameter(function: Callable[..., Any]) -> Callable[..., Any]:
    def more(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    old = inspect.signature(function)
    new = inspect.Parameter("made_up", inspect.Parameter.KEYWORD_ONLY, default=None)
    positional = [one for one in old.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    more.__signature__ = old.replace(parameters=[*positional, new])  # type: ignore[attr-defined]
    return more


@pytest.mark.parametrize(
    ("target", "change", "owner"),
    [
        ("torch.distributed.fsdp.FSDPModule.made_up", lambda _: with_parameter, "FSDPModule"),
        ("torch.distributed.fsdp._fully_shard.fully_shard", with_parameter, "fully_shard"),
        ("torch.nn.parallel.DistributedDataParallel.__init__", with_parameter, "DistributedDataParallel"),
        ("torch.distributed.pipelining.schedules.ScheduleGPipe.__init__", with_parameter, "parameters of schedules"),
        ("torch.distributed.pipelining.PipelineStage.__init__", with_parameter, "PipelineStage"),
        ("torch.distributed.pipelining.__all__", lambda names: [*names, "made_up"], "torch.distributed.pipelining"),
        ("torch.distributed.pipelining.ScheduleGPipe.made_up", lambda _: with_parameter, "methods of schedules"),
        ("torch.distributed.fsdp.FSDPModule.set_all_reduce_hook", with_parameter, "set_all_reduce_hook"),
        (
            "torch.distributed.tensor.experimental._context_parallel.context_parallel",
            with_parameter,
            "context_parallel",
        ),
        ("torch.distributed.tensor.experimental._context_parallel._cp_options.made_up", lambda _: 1, "_cp_options"),
    ],
)
def test_an_option_that_a_torch_adds_is_missed(
    monkeypatch: pytest.MonkeyPatch, target: str, change: Callable[[Any], Any], owner: str
) -> None:
    before = differences(release(torch.__version__))
    where, _, name = target.rpartition(".")
    holder: Any = pkgutil.resolve_name(where)
    monkeypatch.setattr(holder, name, change(getattr(holder, name, None)), raising=False)
    assert differences(release(torch.__version__)) - before == {(owner, "made_up")}


def test_an_option_that_a_torch_takes_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    before = differences(release(torch.__version__))
    monkeypatch.delattr(FSDPModule, "set_all_reduce_hook")
    assert differences(release(torch.__version__)) - before == {
        ("FSDPModule", "set_all_reduce_hook"),
        ("set_all_reduce_hook", "stream"),
    }
