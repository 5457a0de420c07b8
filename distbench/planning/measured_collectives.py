"""Collectives that run files and files of nccl-tests have measured, and a profile fitted to them without ranks."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec

from distbench.planning.cost_profile import (
    ALL_GATHER,
    ALL_TO_ALL,
    COLLECTIVES,
    DIRECT,
    KNEE_MIN_SIZES,
    LOCAL_OPS,
    NATIVE_ALL_TO_ALL,
    Line,
    Profile,
    Sample,
    fit_line,
)
from distbench.planning.profile_fit import hosts_of
from distbench.records.bus_bandwidth import busbw_factor
from distbench.records.nccl_tests import MESH_DIM, is_nccl_tests, read_nccl_tests
from distbench.records.results_folder import NO_RUNS, named_runs, read_each, run_files_in
from distbench.records.run_file import Record, Run, read_run
from distbench.spec.errors import UserError
from distbench.spec.file_io import opened
from distbench.spec.mesh import brief_shape, group_shape, mesh_shapes, mesh_size, slowest
from distbench.spec.printable_text import count_text

BROADCAST, SEND_RECV = "broadcast", "send_recv"
KINDS = (*COLLECTIVES, BROADCAST, SEND_RECV)
COPYING = (ALL_GATHER, "reduce_scatter", ALL_TO_ALL, NATIVE_ALL_TO_ALL)  # steps that copy other tensor dims than 0
USUAL_DTYPE = "f32"  # of calibrate
# Ratio of two files' times above which they contradict each other; ratio of a busbw to its file's own that shows
# another unit; busbw in GB/s that is rounded too much for this.
CONTRADICTION, WRONG_UNIT, LEAST_BUSBW = 1.25, 2.0, 0.1
HELD_OUT_EVERY = 3


class Group(NamedTuple):
    """The groups of one collective.

    Args:
        mesh_dim: of a run; "" for other groups, such as those of nccl-tests.
        shape: placement on hosts (`spec.mesh.SHAPE`), "" for unknown hosts.
    """

    op: str
    mesh_dim: str
    size: int
    shape: str

    @property
    def on_hosts(self) -> list[int]:
        """The ranks on each host, of the groups on most hosts; empty for unknown hosts."""
        return [int(count) for count in slowest(self.shape).split("+") if count]


@dataclass(frozen=True)
class Timing:
    """One measured time.

    Args:
        file: name of the file.
        is_step: whether it is of a step of DTensor, as calibrate measures, rather than of the collective alone.
        held_out: whether it validates the fit.
    """

    group: Group
    dtype: str
    sample: Sample
    file: str
    is_step: bool = False
    held_out: bool = False


def read_sources(targets: Iterable[Path], results: Path, warnings: list[str]) -> list[Run]:
    """Read run files, files of nccl-tests, folders of both, and names of runs under `results`.

    Args:
        warnings: receives sentences on files of folders that are left out, and on unreadable lines.

    Raises:
        UserError: a file does not exist or cannot be read, or nothing is readable in a folder.
    """
    runs: dict[Path, Run] = {}
    for target in named_runs(targets, results):
        if target.is_dir():
            files = [file for file in sorted(target.rglob("*.json")) if not NO_RUNS & {*file.parts}]
            files = [*run_files_in(target), *(file for file in files if file.is_file() and _is_nccl_tests(file))]
            target_runs = read_each(files, _read, warnings)
            if not target_runs:
                raise UserError(f"folder {target} has no readable run file and no file of nccl-tests; give other files")
        elif target.exists():
            target_runs = [_read(target)]
        else:
            raise UserError(f"{target} does not exist; give run files, files of nccl-tests, or a folder of them")
        runs.update({run.path.resolve(): run for run in target_runs})
    for run in runs.values():
        warnings += run.warnings
    return [*runs.values()]


def _is_nccl_tests(file: Path) -> bool:
    with opened(file, "file") as head:
        return is_nccl_tests(head.read(512))


def _read(file: Path) -> Run:
    if _is_nccl_tests(file):
        return read_nccl_tests(file)
    if file.suffix != ".jsonl":
        raise UserError(f"{file} is not a file of nccl-tests (-J FILE); give another file, or run files (.jsonl)")
    return read_run(file)


def timings_in(
    runs: Sequence[Run], devices_per_node: int | None, warnings: list[str]
) -> tuple[list[Timing], list[Run]]:
    """Return the measured times of collectives, of one dtype per group, out of place where a file has both; and the
    runs with such times.

    Args:
        devices_per_node: of files of nccl-tests; None for the number that their host names show.
        warnings: receives sentences on results that are left out, and on files that contradict each other.

    Raises:
        UserError: no collective was measured, the files are of different machines, or a group has unknown hosts.
    """
    timings: list[Timing] = []
    measured: list[Run] = []
    names = Counter(run.path.name for run in runs)
    for run in runs:
        file = run.path.name if names[run.path.name] == 1 else str(run.path)
        if run.is_simulated:
            warnings.append(f"{file} is simulated, not measured, and was left out")
        elif of_run := _timings_of(run, file, devices_per_node, warnings):
            timings += of_run
            measured.append(run)
    if not timings:
        files, why = count_text(len(runs), "file"), f" ({warnings[0]})" if warnings else ""
        raise UserError(
            f"no valid time of a collective in {files}{why}; measure with distbench run collectives, or with nccl-tests"
        )
    _require_one_machine(measured)
    timings = _of_one_dtype(timings, warnings)
    warnings += _contradictions(timings)
    return timings, measured


def num_ranks_of(runs: Sequence[Run]) -> int:
    """Return the ranks of the largest run."""
    return max(mesh_size(run.header["job"]["mesh"]) for run in runs)


def _timings_of(run: Run, file: str, devices_per_node: int | None, warnings: list[str]) -> list[Timing]:
    records = [record for record in run.cases if _op_of(record)]
    records = [record for record in records if _counters(record).get("placement") != "in_place"] or records
    usable = [record for record in records if record["status"] == "ok" and record.get("samples_s")]
    if len(usable) < len(records):
        first = next(record for record in records if record not in usable)
        num_others = count_text(len(records) - len(usable), "result")
        warnings.append(f"{file}: left out: {num_others} (the first: {first.get('error') or first['status']})")
    timings = []
    other_ops, num_single = set(), 0
    try:
        for record in usable:
            timing = _timing_of(run, file, record, devices_per_node)
            if timing.group.op not in KINDS and not timing.is_step:
                other_ops.add(timing.group.op)
            elif timing.group.size == 1:
                num_single += 1
            elif timing.sample.payload_bytes > 0:
                timings.append(timing)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        problem = f"{file} has a collective without the fields of distbench ({error!r})"
        raise UserError(f"{problem}; measure again with distbench run collectives") from error
    if other_ops:
        warnings.append(f"{file}: left out: {', '.join(sorted(other_ops))}; usable are {', '.join(KINDS)}")
    if num_single:
        warnings.append(f"{file}: left out: {count_text(num_single, 'result')} of one rank, or of unknown ranks")
    return timings


def _is_of_nccl_tests(run: Run) -> bool:
    return MESH_DIM in (run.about.mesh or {})


def _op_of(record: Record) -> str | None:
    """Return the collective or step of a case; None for other cases."""
    case = record["case"]
    params = case.get("params") or {}
    is_one = case.get("kind") in ("collective", "calibrate") or params.get("what") == "collective"
    # A variant is another way of a collective, or an uneven one.
    return params.get("op") if is_one and not (case["kind"] == "collective" and "variant" in params) else None


def _counters(record: Record) -> Record:
    return record.get("counters") or {}


def _timing_of(run: Run, file: str, record: Record, devices_per_node: int | None) -> Timing:
    params, counters = record["case"]["params"], _counters(record)
    op, size, seconds = params["op"], int(record["group_size"]), statistics.median(record["samples_s"])
    is_step, hosts = record["case"]["kind"] == "calibrate", hosts_of(run)
    if record["case"]["kind"] == "compute":  # of calibrate_operators
        mesh_dim, shape = "", params["lies"] or (str(size) if hosts else "")
        payload, seconds, dtype = float(counters["amount"]), seconds / counters["repeats"], USUAL_DTYPE
    elif _is_of_nccl_tests(run):
        mesh_dim, payload, dtype = "", float(record["payload_bytes"]), params["dtype"]
        shape = _shape_on_nodes(run, size, params.get("lies"), devices_per_node)
        _require_microseconds(run, op, size, payload / seconds, counters.get("reported_busbw_gb_per_s"))
    else:
        mesh_dim, payload, dtype = params["mesh_dim"], float(record["payload_bytes"]), params["dtype"]
        # Groups of a calibration that belong to no mesh dim have their shape as name.
        shape = mesh_shapes(dict(run.header["job"]["mesh"]), hosts).get(mesh_dim, mesh_dim) if hosts else ""
    sample = Sample(payload, counters.get("num_copies", 0), seconds, counters.get("num_messages", 0))
    return Timing(Group(op, mesh_dim, size, shape), dtype, sample, file, is_step, bool(params.get("held_out")))


def _shape_on_nodes(run: Run, size: int, shape: str | None, devices_per_node: int | None) -> str:
    """Return the shape of a group of nccl-tests; UserError for unknown hosts, or more ranks on a host than devices."""
    if size == 1:
        return "1"
    if shape is None and devices_per_node is None:
        raise UserError(
            f"{run.path} does not state the hosts of its {count_text(size, 'rank')}; give --devices-per-node N"
        )
    shape = shape or group_shape(range(size), [str(rank // (devices_per_node or 1)) for rank in range(size)])
    most = max(map(int, re.split(r"[+|]", shape)))
    if devices_per_node and most > devices_per_node:
        problem = f"{run.path} has {count_text(most, 'rank')} on one host, more than --devices-per-node"
        raise UserError(f"{problem} {devices_per_node}; give the number of devices per node")
    return shape


def _require_microseconds(run: Run, op: str, size: int, bytes_per_s: float, reported: float | None) -> None:
    """Raise UserError if a time and the reported busbw, in GB/s, have different units."""
    if op not in KINDS or size < 2 or not bytes_per_s or not reported or reported < LEAST_BUSBW:
        return
    ratio = bytes_per_s * busbw_factor(op, size) / 1e9 / reported
    if not 1 / WRONG_UNIT < ratio < WRONG_UNIT:
        problem = f"{run.path} has a time that is {max(ratio, 1 / ratio):,.0f}x {'shorter' if ratio > 1 else 'longer'}"
        raise UserError(
            f"{problem} than its own bus bandwidth shows; give the file as nccl-tests wrote it, in us and GB/s"
        )


def _require_one_machine(runs: Sequence[Run]) -> None:
    """Raise UserError for files of several backends, devices, or machines of distbench's own runs."""
    for name, word in (("backend", "backends"), ("device_name", "devices"), ("machine", "machines")):
        files: dict[str, str] = {}
        for run in runs:
            value = getattr(run.about.environment, name)
            if value and (name != "machine" or not _is_of_nccl_tests(run)):
                files.setdefault(value, run.path.name)
        if len(files) > 1:
            listed = " and ".join(f"{value} ({file})" for value, file in [*files.items()][:2])
            raise UserError(f"the files come from {len(files)} {word}: {listed}; give the files of one machine")


def _of_one_dtype(timings: Sequence[Timing], warnings: list[str]) -> list[Timing]:
    """Return the times of f32, or of the dtype with most sizes, per group; dtypes are never mixed in one fit."""
    dtypes: dict[Group, Counter[str]] = {}
    for timing in timings:
        dtypes.setdefault(timing.group, Counter())[timing.dtype] += 1
    chosen = {
        group: USUAL_DTYPE if USUAL_DTYPE in counts else counts.most_common(1)[0][0] for group, counts in dtypes.items()
    }
    left_out = sorted({timing.dtype for timing in timings if timing.dtype != chosen[timing.group]})
    if left_out:
        fitted = ", ".join(sorted({*chosen.values()}))
        warnings.append(
            f"dtype {fitted} is fitted; left out: {', '.join(left_out)}; -k {left_out[0]} fits {left_out[0]}"
        )
    return [timing for timing in timings if timing.dtype == chosen[timing.group]]


def _contradictions(timings: Sequence[Timing]) -> Iterator[str]:
    """Yield a sentence on the group whose times differ most between files, at sizes that the files share."""
    by_group: dict[tuple[Group, bool], dict[float, dict[str, list[float]]]] = {}
    for timing in timings:
        sizes = by_group.setdefault((timing.group, timing.is_step), {})
        files = sizes.setdefault(timing.sample.payload_bytes, {})
        files.setdefault(timing.file, []).append(timing.sample.seconds)
    differing = []
    for (group, _), sizes in by_group.items():
        for first, second in combinations(dict.fromkeys(file for files in sizes.values() for file in files), 2):
            common = [files for files in sizes.values() if first in files and second in files]
            if not common:
                continue
            ratio = statistics.median(
                statistics.median(files[first]) / statistics.median(files[second]) for files in common
            )
            slower, faster = (first, second) if ratio > 1 else (second, first)
            if max(ratio, 1 / ratio) > CONTRADICTION:
                differing.append((max(ratio, 1 / ratio), group, slower, faster, len(common)))
    if differing:
        ratio, group, slower, faster, num_sizes = max(differing)
        others = len({group for _, group, *_ in differing}) - 1
        more = f", and {count_text(others, 'more group')} above {CONTRADICTION:g}x" if others else ""
        where = f"{group.op} in groups of {brief_shape(group.shape) or group.size}"
        yield (
            f"{slower} and {faster} contradict each other: {where} takes {ratio:.2f}x as long in {slower} (median of "
            f"{count_text(num_sizes, 'size')}){more}. All were fitted together; leave out the file that is wrong"
        )


# The profile.


def profile_from(
    timings: Sequence[Timing], runs: Sequence[Run], devices_per_node: int | None, copies: tuple[float, str] | None
) -> Profile:
    """Fit a profile to measured times.

    Steps of DTensor replace collectives of the same group. DTensor on gloo runs an all-to-all as an all-gather of the
    whole tensor (`simulate.operator_costs.collective_on_host`), which gives its line.

    Args:
        runs: the runs of `timings`.
        copies: seconds per copied byte for lines that are not of steps, and the source; None for free copies.

    Raises:
        UserError: a group has only one size, or there is no collective of redistributions.
    """
    environments = [run.about.environment for run in runs]
    is_gloo = environments[0].backend == "gloo"
    mesh, hosts = _layout(timings, runs, devices_per_node)
    place = {name: number for number, name in enumerate(mesh)}
    lines = [_line(key, of_key, copies) for key, of_key in _by_line(timings, is_gloo).items()]
    if not lines:
        raise UserError(
            f"no file has {', '.join(COLLECTIVES)}, which a profile needs; add files, or give --only hardware"
        )
    lines.sort(key=lambda line: (place.get(line.mesh_dim, len(place)), line.group_size, line.op in LOCAL_OPS, line.op))
    source = f"distbench calibrate --from {', '.join(dict.fromkeys(timing.file for timing in timings))}"
    if not all(timing.is_step for timing in timings):
        price = f"copies: {copies[1]}" if copies else "copies cost nothing"
        source += f"; collectives alone, without DTensor's own time; {price}"
    return Profile(
        ", ".join(dict.fromkeys(map(_machine, runs))),
        str(environments[0].backend),
        ", ".join(dict.fromkeys(about.torch or "none (nccl-tests)" for about in environments)),
        mesh,
        tuple(lines),
        source,
        hosts,
    )


def _machine(run: Run) -> str:
    """Return the machine's name, or the device of a file of nccl-tests, which may have many hosts."""
    about = run.about.environment
    return (about.device_name if _is_of_nccl_tests(run) else None) or about.machine or "unknown"


def _by_line(timings: Sequence[Timing], is_gloo: bool) -> dict[tuple[str, str, int], list[Timing]]:
    """Return the times of each line of a profile by its key: op, mesh dim and group size.

    Groups without a mesh dim get `dp_shard` or `tp`; a second group of that name and size has its shape as name.
    """
    by_key: dict[tuple[str, str, int], list[Timing]] = {}
    shapes: dict[tuple[str, int], str] = {}
    for timing in timings:
        _, mesh_dim, size, shape = timing.group
        mesh_dim = mesh_dim or ("dp_shard" if "+" in shape else "tp")
        if shape and shapes.setdefault((mesh_dim, size), shape) != shape:
            mesh_dim = shape
        for op, of_op in _in_dtensor(timing, is_gloo):
            by_key.setdefault((op, mesh_dim, size), []).append(of_op)
    return {key: [timing for timing in of_key if timing.is_step] or of_key for key, of_key in by_key.items()}


def _in_dtensor(timing: Timing, is_gloo: bool) -> Iterator[tuple[str, Timing]]:
    """Yield the ops of a profile that a time is of."""
    op, sample = timing.group.op, timing.sample
    if timing.is_step or op in COLLECTIVES:
        yield (NATIVE_ALL_TO_ALL if is_gloo and op == ALL_TO_ALL and not timing.is_step else op), timing
    if is_gloo and op == ALL_GATHER and not timing.is_step:
        share = replace(sample, payload_bytes=sample.payload_bytes / timing.group.size)
        yield ALL_TO_ALL, replace(timing, sample=share)


def _line(key: tuple[str, str, int], timings: Sequence[Timing], copies: tuple[float, str] | None) -> Line:
    fitted, held_out = fitted_and_held_out(timings)
    try:
        line = fit_line(*key, fitted, held_out)
    except ValueError as error:
        files = ", ".join(dict.fromkeys(timing.file for timing in timings))
        raise UserError(f"{files} cannot be fitted ({error}); measure more sizes") from error
    if copies and key[0] in COPYING and not timings[0].is_step:
        line = msgspec.structs.replace(line, per_copied_byte_s=copies[0])
    return msgspec.structs.replace(line, hosts=timings[0].group.shape)


def fitted_and_held_out(timings: Sequence[Timing]) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to fit and to validate: of collectives every third size, if enough sizes remain."""
    sizes = sorted({timing.sample.payload_bytes for timing in timings})
    left_open = set(sizes[1:-1:HELD_OUT_EVERY]) if len(sizes) >= KNEE_MIN_SIZES + 2 else set()
    fitted: list[Sample] = []
    held_out: list[Sample] = []
    for timing in timings:
        is_held_out = timing.held_out if timing.is_step else timing.sample.payload_bytes in left_open
        (held_out if is_held_out else fitted).append(timing.sample)
    return fitted, held_out


def _layout(
    timings: Sequence[Timing], runs: Sequence[Run], devices_per_node: int | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return mesh and hosts: of the largest run of distbench, else nodes of equal size that hold all groups."""
    if own_runs := [run for run in runs if not _is_of_nccl_tests(run)]:
        largest = max(own_runs, key=lambda run: mesh_size(run.header["job"]["mesh"]))
        return dict(largest.header["job"]["mesh"]), hosts_of(largest)
    groups = {timing.group for timing in timings}
    num_here = devices_per_node or max(max(group.on_hosts) for group in groups)
    num_nodes = max(len(group.on_hosts) for group in groups)
    hosts = tuple(f"node {rank // num_here}" for rank in range(num_here * num_nodes))
    measured = {group.shape for group in groups}
    meshes = ({"dp_shard": num_nodes, "tp": num_here}, {"dp_shard": len(hosts)})
    sizes = [{name: size for name, size in mesh.items() if size > 1} for mesh in meshes]
    covered = [mesh for mesh in sizes if all(mesh_shapes(mesh, hosts)[name] in measured for name in mesh)]
    return (covered or sizes)[0], hosts


def problems_of(profile: Profile) -> Iterator[str]:
    """Yield a sentence per set of collectives that groups lack, and on groups that the mesh cannot have."""
    num_ranks = mesh_size(profile.mesh)
    ops: dict[tuple[str, int], set[str]] = {}
    for line in profile.lines:
        if line.op != DIRECT:  # over all mesh dims together
            ops.setdefault((line.mesh_dim, line.group_size), set()).add(line.op)
    groups: dict[tuple[str, ...], list[str]] = {}
    for (mesh_dim, size), measured in ops.items():
        if missing := tuple(op for op in COLLECTIVES if op not in measured):
            groups.setdefault(missing, []).append(f"{mesh_dim} of {size}")
        if num_ranks % size:
            yield f"{mesh_dim} of {size} does not divide a mesh of {num_ranks} ranks and prices only other meshes"
    for missing, names in groups.items():
        lack = "lacks" if len(names) == 1 else "lack"
        yield f"{' and '.join(names)} {lack} {', '.join(missing)}, which redistribute needs; measure this too"
