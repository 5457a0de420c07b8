"""Saves of a step's sharded state by torch.distributed.checkpoint (DCP), and loads of these files on any mesh."""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from distbench.cases.step import NEEDS_A_BATCH
from distbench.plans.batch import batch_of
from distbench.plans.model import blueprint
from distbench.plans.plan_check import problems
from distbench.plans.training_step import TrainingStep, step_of
from distbench.plans.user_step import torch_optimizers
from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import RankContext
from distbench.ranks.device import synchronize
from distbench.ranks.failure import one_line
from distbench.ranks.measure import Stamp, no_stamp
from distbench.records.run_file import Case
from distbench.spec import Checkpoints, Scenario, UserError, format_mesh
from distbench.spec.job import mesh_on
from distbench.spec.scenario import CHECKPOINT_WAYS
from distbench.torch_private import Skipped

SAVE_PHASES = ("blocked", "background")
OTHER_FOLDER = "give another folder, Checkpoints(folder=...)"
OWN_FOLDER = "distbench-checkpoint-"  # begins the names of folders that a killed launch may leave
State = dict[str, Any]


class CheckpointFailed(Exception):
    """A save or a load failed; the message has the rank, the folder and the cause."""


def checkpoint_cases(scenario: Scenario, label: str, context: RankContext) -> Iterator[CaseSpec]:
    """Yield one case per way of saving and per mesh on which the files are loaded.

    Raises:
        UserError: no model, a pipeline, an unknown way, a mesh that does not fit, or a folder that is not writable, not
            empty or not shared by all hosts.
    """
    for declared in scenario.checkpoints:
        _check(declared, scenario, label)
        here: dict[str, int] = dict(zip(context.mesh_dims, context.mesh_shape, strict=True))
        meshes = (here, *(mesh_on(text, here, "Checkpoints.load_meshes") for text in declared.load_meshes))
        targets = {format_mesh(mesh): mesh for mesh in meshes}
        contexts = {name: _context_on(mesh, here, scenario, label, context) for name, mesh in targets.items()}
        parent = Path(declared.folder or tempfile.gettempdir())
        _require_folder(parent, bool(declared.folder), context)
        # A save in the background communicates while a step does, so the two need separate groups.
        group = context.control if context.is_fake else dist.new_group(backend="gloo")
        name, _, axes = label.partition("/")
        params = {"scenario": name, "variant": axes, "source": format_mesh(here)}
        for way in declared.ways:
            case = Case(f"checkpoint/save {way}/{label}", "checkpoint", {**params, "op": f"save {way}"})
            yield CaseSpec(
                case, partial(_open_save, scenario, way, parent, context, group), group=f"checkpoint/{label}"
            )
        for target, load_context in contexts.items():
            case = Case(
                f"checkpoint/load on {target}/{label}", "checkpoint", {**params, "op": "load", "target": target}
            )
            open_load = partial(_open_load, scenario, parent, context, load_context, group)
            yield CaseSpec(case, open_load, group=f"checkpoint/{label}")


def _check(declared: Checkpoints, scenario: Scenario, label: str) -> None:
    if scenario.build_model is None or scenario.make_batch is None:
        problem = "Checkpoints need a model" if scenario.build_model is None else NEEDS_A_BATCH
        raise UserError(f"{label}: {problem}; give build_model and make_batch")
    if scenario.plan.pipeline is not None:
        raise UserError(f"{label}: Checkpoints do not support a pipeline; leave out plan.pipeline or checkpoints")
    if unknown := [way for way in declared.ways if way not in CHECKPOINT_WAYS]:
        raise UserError(f"{label}: checkpoint way {unknown[0]!r} is unknown; use {', '.join(CHECKPOINT_WAYS)}")


def _context_on(
    mesh: dict[str, int], here: dict[str, int], scenario: Scenario, label: str, context: RankContext
) -> RankContext:
    """Return the context of another mesh of all ranks, on which the scenario's plan works."""
    if mesh == here:
        return context
    other = replace(
        context, mesh=init_device_mesh(context.device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    )
    assert scenario.build_model is not None
    model = blueprint(scenario.build_model, context.seed).model
    if sentences := problems(model, batch_of(scenario), scenario.step_plan, other):
        raise UserError(f"{label}: on mesh {format_mesh(mesh)}: {sentences[0]}; load on another mesh")
    return other


def _require_folder(parent: Path, is_given: bool, context: RankContext) -> None:
    """Raise UserError on every rank if the folder is not writable, not empty, or not the same on all hosts."""
    if context.is_fake:
        return
    if len(set(context.hosts)) > 1 and not is_given:
        raise UserError("checkpoints of several hosts need a folder that all hosts share; give Checkpoints(folder=...)")
    problem, marker = None, parent / f"{OWN_FOLDER}{context.gather(id(context))[0]}"
    if context.rank == 0:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            if is_given and any(not path.name.startswith(OWN_FOLDER) for path in parent.iterdir()):
                problem = f"folder {parent} for checkpoints is not empty; {OTHER_FOLDER}, that is new or empty"
            else:
                marker.touch()
        except OSError as error:
            problem = f"folder {parent} for checkpoints cannot be written: {error.strerror}; {OTHER_FOLDER}"
    problem = context.gather(problem)[0]
    seen = context.gather(problem is not None or marker.exists())
    if context.rank == 0 and problem is None:
        marker.unlink(missing_ok=True)
    if problem is None and not all(seen):
        host = context.hosts[seen.index(False)] if context.hosts else f"rank {seen.index(False)}"
        problem = f"folder {parent} for checkpoints is not shared: {host} does not see rank 0's files; {OTHER_FOLDER}"
    if problem is not None:
        raise UserError(problem)


@contextlib.contextmanager
def _own_folder(parent: Path, context: RankContext) -> Iterator[Path]:
    """Make a folder for one case, and delete it afterwards. Raise Skipped without other ranks."""
    if context.is_fake:
        raise Skipped("checkpoints need ranks; start them with distbench run")
    made = tempfile.mkdtemp(prefix=OWN_FOLDER, dir=parent) if context.rank == 0 else ""
    folder = Path(context.gather(made)[0])
    try:
        yield folder
    finally:
        if context.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _state_of(step: TrainingStep) -> State:
    model, optimizers = get_state_dict(step.model, torch_optimizers(step.optimizer))
    return {"model": model, "optimizers": optimizers}


@contextlib.contextmanager
def _explained(what: str, folder: Path) -> Iterator[None]:
    """Convert torch's errors, which may hold one error per rank, to one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on overwritten files
            yield
    except (Exception, dcp.CheckpointException) as error:  # torch derives its exception from BaseException
        causes = {rank: cause for rank, (cause, _) in getattr(error, "failures", {}).items()}
        rank, cause = next(iter(causes.items()), (dist.get_rank(), error))
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else one_line(cause)
        # torch replaces the error of a full disk by one of its file format.
        free = f"the disk has {shutil.disk_usage(folder).free >> 20:,} MiB free"
        raise CheckpointFailed(
            f"{what} in {folder} failed on rank {rank}: {reason}; {free}: free space, or {OTHER_FOLDER}"
        ) from error


def _write(way: str, state: State, folder: Path, group: dist.ProcessGroup) -> Callable[[], object]:
    """Begin a save; return the function that waits for its end."""
    writer = dcp.FileSystemWriter(folder)
    if way == "sync":
        dcp.save(state, storage_writer=writer, process_group=group)
        return lambda: None
    kind = {"async": "THREAD", "async_process": "PROCESS"}[way]
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    saved: Any = dcp.async_save(
        state,
        storage_writer=writer,
        process_group=group,
        async_checkpointer_type=getattr(AsyncCheckpointerType, kind),
    )
    return lambda: getattr(saved, "upload_completion", saved).result()


@contextlib.contextmanager
def _open_save(
    scenario: Scenario, way: str, parent: Path, context: RankContext, group: dist.ProcessGroup
) -> Iterator[OpenedCase]:
    counters: dict[str, Any] = {}
    with _own_folder(parent, context) as folder:
        step = step_of(scenario, context)
        step(no_stamp)  # an optimizer without a step has no state

        def save(stamp: Stamp) -> None:
            with _explained(f"save {way}", folder):
                wait = _write(way, _state_of(step), folder, group)
                synchronize(context.device)
                stamp()
                wait()
                stamp()

        def check() -> str | None:
            """Change the state while it is written; compare the files with the state at the time of the save."""
            expected = _copied(_state_of(step))
            with _explained(f"save {way}", folder):
                wait = _write(way, _state_of(step), folder, group)
                step(no_stamp)
                wait()
                dist.barrier(context.control)
                counters["state_bytes"] = sum(file.stat().st_size for file in folder.iterdir())
                dcp.load(loaded := _emptied(expected), checkpoint_id=folder, process_group=group)
            return _first_difference(loaded, expected)

        yield OpenedCase(save, check, SAVE_PHASES, _fields(context), lambda: counters)


@contextlib.contextmanager
def _open_load(
    scenario: Scenario, parent: Path, context: RankContext, load_context: RankContext, group: dist.ProcessGroup
) -> Iterator[OpenedCase]:
    with _own_folder(parent, context) as folder:
        step, target = step_of(scenario, context), step_of(scenario, load_context)
        step(no_stamp)
        with _explained("save sync", folder):
            _write("sync", _state_of(step), folder, group)
        dist.barrier(context.control)
        counters = {"state_bytes": sum(file.stat().st_size for file in folder.iterdir())}

        def load(stamp: Stamp) -> None:
            with _explained("load", folder):
                state = _state_of(target)
                dcp.load(state, checkpoint_id=folder, process_group=group)
                set_state_dict(
                    target.model,
                    torch_optimizers(target.optimizer),
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizers"],
                )
                synchronize(context.device)

        def check() -> str | None:
            with torch.no_grad():
                for tensor in dict(_leaves(_state_of(target))).values():
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                        tensor.fill_(torch.nan)
            load(no_stamp)
            return _first_difference(_state_of(target), _state_of(step))

        yield OpenedCase(load, check, (), _fields(context), lambda: counters)


def _fields(context: RankContext) -> dict[str, Any]:
    return {"group_size": context.mesh.size(), "mesh_dim": "x".join(context.mesh_dims)}


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a nested state, in an order that is the same on all ranks."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from _leaves(state[key], f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for index, part in enumerate(state):
            yield from _leaves(part, f"{path}.{index}")
    else:
        yield path, state


def _mapped(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _mapped(function, part) for key, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_mapped(function, part) for part in state)
    return function(state)


def _copied(state: State) -> State:
    copied: State = _mapped(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, state)
    return copied


def _emptied(state: State) -> State:
    emptied: State = _mapped(lambda value: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None, state)
    return emptied


def _whole(value: Any) -> Any:
    """Return a tensor's bytes over all its shards, or a value that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().contiguous().reshape(-1).view(torch.uint8)


def _first_difference(loaded: State, expected: State) -> str | None:
    """Return the first difference in bits as a sentence; None for equal states. All ranks must call this together."""
    loaded_leaves, expected_leaves = dict(_leaves(loaded)), dict(_leaves(expected))
    if lacking := sorted(loaded_leaves.keys() ^ expected_leaves.keys()):
        return f"{lacking[0]} is in only one of the saved and the loaded state"
    wrong = []
    for name, value in expected_leaves.items():
        got, wanted = _whole(loaded_leaves[name]), _whole(value)
        equal = torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted
        wrong += [] if equal else [name]
    return (
        f"{len(wrong)} of {len(expected_leaves)} loaded values differ from the saved values: {wrong[0]}"
        if wrong
        else None
    )
