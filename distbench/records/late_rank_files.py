"""Arrivals at collectives, from files of PyTorch's Flight Recorder and of NCCL Inspector.

Formats, from the tools' sources:
- Flight Recorder (`torch._C._distributed_c10d._dump_nccl_trace`, `_dump_fr_trace`, pickle or JSON; one file per rank,
  whose name ends with the rank): version, pg_config {name: {desc, ranks: "[0, 1]"}}, entries [{process_group: [name,
  desc], collective_seq_id, is_p2p, profiling_name: "nccl:all_reduce", time_created_ns (the host's call, since the
  epoch), duration_ms (on the device, with TORCH_NCCL_ENABLE_TIMING=1)}]. gloo records neither ranks nor durations.
- NCCL Inspector 4.x and 5.x (one JSON object per line): {header: {id, comm_name, rank, n_ranks}, metadata: {hostname,
  pid}, coll_perf: {coll, coll_sn, coll_exec_time_us}}. Since v4.3 header and metadata are in the previous line, with
  dump_stats. `coll_sn` counts each kind of collective of a communicator.
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from distbench.spec.errors import UserError
from distbench.spec.file_io import opened, parse_json
from distbench.statistics.intervals import Floats

MAX_BYTES, MAX_NS = 1 << 30, 1e19
# Collectives that end at about the same time on all ranks.
SYMMETRIC = ("allgather", "reducescatter", "allreduce", "alltoall")
_RANK = re.compile(r"(\d+)$")


@dataclass
class CollectiveTimes:
    """Times of one group's collectives in files.

    Attributes:
        name: in messages.
        members: key of each rank with a file, in the group's order: its number, or its host and process.
        ranks: names of the members in messages, by key.
        hosts: hosts by key; empty if unknown.
        num_ranks: number of ranks of the group, including ranks without a file.
        waited_s: per collective, seconds from arrival to the end, by member.
        arrived_s: per collective, seconds since the epoch of the host's call, by member.
        is_device: whether collectives run on a device, whose arrivals differ from those of the host's calls.
    """

    name: str
    members: list[Any] = field(default_factory=list)
    ranks: dict[Any, str] = field(default_factory=dict)
    hosts: dict[Any, str] = field(default_factory=dict)
    num_ranks: int = 0
    waited_s: dict[Hashable, dict[Any, float]] = field(default_factory=lambda: defaultdict(dict))
    arrived_s: dict[Hashable, dict[Any, float]] = field(default_factory=lambda: defaultdict(dict))
    is_device: bool = False

    def table(self, times: Mapping[Hashable, Mapping[Any, float]]) -> Floats:
        """Return the collectives that all members have, [collectives, members], in the order of the files."""
        rows = [[of[key] for key in self.members] for of in times.values() if all(key in of for key in self.members)]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.members))


def read_arrivals(paths: Iterable[Path]) -> list[CollectiveTimes]:
    """Return the groups of files, or of all files in folders, that have two or more ranks.

    Raises:
        UserError: a file has another format, or two files are of the same rank.
    """
    files = [
        file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if not file.is_dir()
    ]
    if not files:
        raise UserError("the folder has no file; give files of Flight Recorder or NCCL Inspector, one per rank")
    dumps: dict[int, tuple[Path, dict[str, Any]]] = {}
    inspected: list[tuple[Path, list[Any]]] = []
    for file in files:
        content = _content(file)
        if isinstance(content, list):
            inspected.append((file, content))
            continue
        rank = _RANK.search(file.name.removesuffix(file.suffix) if not _RANK.search(file.name) else file.name)
        if rank is None:
            raise UserError(
                f"{file} is a dump of Flight Recorder, but its name does not end with the rank; rename the file"
            )
        if (number := int(rank[1])) in dumps:
            raise UserError(f"{file} and {dumps[number][0]} are both files of rank {number}; give one file per rank")
        dumps[number] = (file, content)
    if dumps and inspected:
        raise UserError(
            f"{inspected[0][0]} is a file of NCCL Inspector, but others are files of Flight Recorder; "
            "give files of one tool"
        )
    groups = _of_flight_recorder(dumps) if dumps else _of_inspector(inspected)
    return [group for group in groups if group.num_ranks > 1]


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that accepts lists, dictionaries, numbers and texts only, because a pickle may run any code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _content(file: Path) -> dict[str, Any] | list[Any]:
    """Return a dump of Flight Recorder, or the lines of a file of NCCL Inspector."""
    with opened(file, "file", MAX_BYTES) as stream:
        data = stream.read()
    try:
        if data.lstrip()[:1] != b"{":
            dump = _PlainUnpickler(io.BytesIO(data)).load()
        elif b'"coll_perf"' in data or b'"dump_stats"' in data:
            return [parse_json(line) for line in data.splitlines() if line.strip()]
        else:
            dump = parse_json(data, json.JSONDecoder())  # nanoseconds since the epoch exceed MAX_COUNT
    except Exception as error:  # bytes that are not a pickle raise errors of many types
        raise _unknown(file, str(error) or type(error).__name__) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise _unknown(file, "it has no entries")
    return dump


def _unknown(file: Path, why: str) -> UserError:
    known = "Flight Recorder (pickle or JSON) or NCCL Inspector (JSON lines)"
    return UserError(f"{file} is not a file of {known}: {why[:200]}; give only such files")


def _of_flight_recorder(dumps: Mapping[int, tuple[Path, dict[str, Any]]]) -> list[CollectiveTimes]:
    groups: dict[str, CollectiveTimes] = {}
    for rank, (file, dump) in sorted(dumps.items()):
        try:
            for name, config in (dump.get("pg_config") or {}).items():
                group = groups.setdefault(str(name), CollectiveTimes(str(name)))
                group.num_ranks = len(
                    json.loads(config["ranks"]) if isinstance(config["ranks"], str) else config["ranks"]
                )
            for entry in dump["entries"]:
                _add_entry(groups, rank, entry)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise _unknown(file, f"a value of an entry is missing or wrong ({error!r})") from error
    for group in groups.values():
        group.members = sorted(group.ranks)
        group.num_ranks = max(group.num_ranks, len(group.members))
    return [group for group in groups.values() if group.members]


def _add_entry(groups: dict[str, CollectiveTimes], rank: int, entry: Mapping[str, Any]) -> None:
    if entry["is_p2p"]:
        return
    name, description = entry["process_group"]
    group = groups.setdefault(str(name), CollectiveTimes(str(name)))
    group.name = str(name) if description in ("undefined", "") else str(description)
    group.ranks[rank] = f"rank {rank}"
    backend, _, kind = str(entry["profiling_name"]).partition(":")
    number = int(entry["collective_seq_id"])
    group.arrived_s[number].setdefault(rank, _seconds(entry["time_created_ns"], 1e-9))
    group.is_device |= backend != "gloo"
    if (duration := entry.get("duration_ms")) is not None and _is_symmetric(kind):
        group.waited_s[number].setdefault(rank, _seconds(duration, 1e-3))


def _seconds(value: Any, unit_s: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NS:
        raise ValueError(f"{value!r} is not a time")
    return value * unit_s


def _is_symmetric(kind: str) -> bool:
    return any(name in kind.replace("_", "").lower() for name in SYMMETRIC)


def _of_inspector(files: Sequence[tuple[Path, list[Any]]]) -> list[CollectiveTimes]:
    groups: dict[str, CollectiveTimes] = {}
    sizes: dict[str, int] = {}
    places: dict[tuple[str, tuple[str, int]], int] = {}  # rank in the communicator of a process
    for file, lines in files:
        try:
            for header, metadata, perf in _with_context(lines):
                process = (str(metadata["hostname"]), int(metadata["pid"]))
                name = str(header["id"])
                known = str(header.get("comm_name") or "unknown")
                group = groups.setdefault(name, CollectiveTimes(name if known == "unknown" else known))
                sizes[name], places[name, process] = int(header["n_ranks"]), int(header["rank"])
                group.hosts[process] = process[0]
                if _is_symmetric(str(perf["coll"])):
                    key = (str(perf["coll"]), int(perf["coll_sn"]))
                    group.waited_s[key].setdefault(process, _seconds(perf["coll_exec_time_us"], 1e-6))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unknown(file, f"a value of a line is missing or wrong ({error!r})") from error
    processes = {process for _, process in places}
    whole = next((name for name, size in sizes.items() if size == len(processes)), None)
    for name, group in groups.items():
        # A communicator of all processes has the ranks of the job.
        group.ranks = {
            process: f"rank {places[whole, process]}"
            if whole is not None and (whole, process) in places
            else f"rank {places[name, process]} of the group (pid {process[1]})"
            for process in group.hosts
        }
        group.members = [process for _, process in sorted((places[name, process], process) for process in group.hosts)]
        group.num_ranks = sizes[name]
    return list(groups.values())


def _with_context(lines: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    header = metadata = None
    for line in lines:
        header, metadata = line.get("header", header), line.get("metadata", metadata)
        if "coll_perf" in line:
            yield header, metadata, line["coll_perf"]
