"""Late ranks in a user's own loop: `with distbench.watch(every=100) as watch:`.

In 1 of `every` steps each rank times its collectives (gloo) at their dispatch by c10d. A rank's own work before a
collective is the time since the rank left its previous collective, of any group. Time in collectives is left out,
because all ranks wait there for the last rank, which makes the ranks' step times equal. Own work needs no common clock
of hosts. The ranks put their sums into the store of the process group, and rank 0 reads the sums later. Therefore no
rank waits for another rank.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from typing import NamedTuple, Self

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.judge.late_ranks import (
    ALPHA,
    UNKNOWN,
    GroupArrivals,
    LatenessVerdict,
    LateRank,
    judge_arrivals,
)
from distbench.observe.module_attribution import mesh_dims_by_ranks
from distbench.ranks.device import Accelerator
from distbench.spec.errors import UserError
from distbench.spec.printable_text import ranks_text
from distbench.torch_private import (
    Issued,
    Unsupported,
    default_store,
    finished_parameter,
    timed_collectives,
    wait_for_stamps,
)

# A smaller lateness is not reported, as a share of the median sampled step.
LEAST_SHARE = 0.02
# The first line is printed after this many sampled steps, the next line after twice as many, and so on.
FIRST_LOOK = 8
EXIT_S = 10.0  # for the last collectives of this rank, and on rank 0 for the last samples of other ranks
SAMPLES = "sampled steps"

Ranks = tuple[int, ...]
_numbers = count()


class TimedCall(NamedTuple):
    """One collective of a step, with times in seconds of this rank's clock.

    Args:
        ranks: sorted ranks of the group; empty for a message between two ranks.
        overlaps: issued by a hook of a gradient, as DDP's reducer does; the rank waits for it after backward.
    """

    ranks: Ranks
    issued_s: float
    completed_s: float | None
    overlaps: bool = False


def own_work(calls: Sequence[TimedCall], start_s: float, end_s: float) -> dict[Ranks, float]:
    """Return per group the seconds of own work before the group's collectives of one step, summed over the step.

    Own work begins when the rank issues its previous collective or leaves it, whichever is later. The work after the
    last collective of a step is added to the first collective, because it delays the first collective of the next step.

    Args:
        calls: in the order of issue.
        start_s, end_s: begin and end of the step.
    """
    work: dict[Ranks, float] = {}
    left_s, running = start_s, list[TimedCall]()
    for call in calls:
        left_s, running = _left(running, call.issued_s, left_s, call.overlaps)
        work[call.ranks] = work.get(call.ranks, 0.0) + max(call.issued_s - left_s, 0.0)
        left_s = max(left_s, call.issued_s)
        running.append(call)
    left_s, _ = _left(running, end_s, left_s, False)
    if first := next((call.ranks for call in calls if call.ranks), None):
        work[first] = work.get(first, 0.0) + end_s - left_s
    work.pop((), None)
    return work


def _left(running: list[TimedCall], now_s: float, left_s: float, overlaps: bool) -> tuple[float, list[TimedCall]]:
    """Return the time at which the rank last left a collective, and the collectives that it has not left at `now_s`."""
    still = []
    for call in running:
        if call.completed_s is None or call.completed_s > now_s or (call.overlaps and overlaps):
            still.append(call)
        else:
            left_s = max(left_s, call.completed_s)
    return left_s, still


class Sample(NamedTuple):
    """One sampled step of one rank: its seconds, and per group (ranks) the name of the mesh dim and own work."""

    step_s: float
    groups: Mapping[Ranks, tuple[str, float]]

    def to_text(self) -> str:
        """Return the sample as JSON."""
        return json.dumps([self.step_s, [[list(ranks), *named] for ranks, named in self.groups.items()]])

    @classmethod
    def of(cls, text: bytes) -> "Sample":
        """Return the sample of a text of `to_text`."""
        step_s, groups = json.loads(text)
        return cls(step_s, {tuple(ranks): (name, work) for ranks, name, work in groups})


def arrivals_of(samples: Sequence[Mapping[int, Sample]], hosts: Sequence[str]) -> list[GroupArrivals]:
    """Return the arrivals of each group, from the samples that all of its ranks have.

    Args:
        samples: per sampled step, the samples by rank.
        hosts: the host of each rank.
    """
    lengths = [sample.step_s for of_step in samples for sample in of_step.values()]
    names = {
        ranks: name for of_step in samples for sample in of_step.values() for ranks, (name, _) in sample.groups.items()
    }
    groups = []
    for ranks, name in sorted(names.items(), key=lambda item: (item[1], item[0])):
        rows = [
            [of_step[rank].groups[ranks][1] for rank in ranks]
            for of_step in samples
            if all(rank in of_step and ranks in of_step[rank].groups for rank in ranks)
        ]
        text = f"{name} {ranks_text(ranks)}".strip()
        members = tuple(f"rank {rank}" for rank in ranks)
        group_hosts = tuple(hosts[rank] for rank in ranks)
        arrivals_s = np.array(rows, dtype=np.float64).reshape(-1, len(ranks))
        groups.append(GroupArrivals(text, members, group_hosts, arrivals_s, LEAST_SHARE * float(np.median(lengths))))
    return groups


class Watch:
    """A watched loop; call `step()` at the end of each step.

    Attributes:
        late: on rank 0, the ranks that arrive last more often than by chance, the latest first, as of the last printed
            line. Empty on other ranks.
        lines: on rank 0, the last printed lines.
    """

    late: tuple[LateRank, ...] = ()
    lines: tuple[str, ...] = ()

    def __init__(self, every: int, mesh: DeviceMesh | None) -> None:
        self._every, self._names = every, mesh_dims_by_ranks([mesh] if mesh is not None else [])
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(f"distbench/watch/{next(_numbers)}", default_store())
        self._store.set(f"host/{self._rank}", os.uname().nodename)
        self._num_steps = self._num_samples = 0
        self._window, self._calls = ExitStack(), list[tuple[Issued, bool]]()
        self._start_s: float | None = None
        self._read: list[dict[int, Sample]] = []  # on rank 0
        self._next_look, self._alpha = FIRST_LOOK, ALPHA / 2
        self._is_open = False
        with timed_collectives(self._on_issue):  # A torch without a required name is rejected before the loop.
            pass
        if self._rank == 0:
            importlib.import_module("scipy.special")  # Otherwise the first evaluation would delay a step.

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_open = False
        self._window.close()
        wait_for_stamps(EXIT_S if kind is None else 1.0)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"ended/{self._rank}", "")
            if self._rank == 0:
                ended = [f"ended/{rank}" for rank in range(self._num_ranks)]
                if kind is None:
                    with contextlib.suppress(RuntimeError):  # A rank has not sent its last samples yet.
                        self._store.wait(ended, timedelta(seconds=EXIT_S))
                self._collect(is_last=True)
                self._report(self._judge(ALPHA / 2), "watch: ")

    def step(self) -> None:
        """End a step of the loop. All ranks must call this equally often; further samples of one rank are not compared.

        Raises:
            UserError: not in the `with` block.
        """
        if not self._is_open:
            raise UserError(
                "watch.step() was called outside of its `with distbench.watch(...)` block; call watch.step() in this "
                "block"
            )
        self._num_steps += 1
        if self._start_s is not None:
            self._end_sample(self._start_s, time.monotonic())
        if self._num_steps % self._every == self._every - 1 or self._every == 1:
            self._calls = []
            self._window.enter_context(timed_collectives(self._on_issue))
            self._start_s = time.monotonic()

    def _on_issue(self, issued: Issued) -> None:
        self._calls.append((issued, issued.is_async and finished_parameter() is not None))

    def _end_sample(self, start_s: float, end_s: float) -> None:
        self._window.close()
        calls = [
            TimedCall(tuple(sorted(issued.call.ranks)), issued.issued_s, issued.completed_s, overlaps)
            if issued.call.peer is None
            else TimedCall((), issued.issued_s, issued.completed_s)
            for issued, overlaps in self._calls
        ]
        work = own_work(calls, start_s, end_s)
        self._start_s, self._calls = None, []
        named = {ranks: (self._names.get(ranks, ""), own_s) for ranks, own_s in work.items() if len(ranks) > 1}
        self._num_samples += 1
        with contextlib.suppress(RuntimeError):  # The process of the store has ended, so the loop itself will fail.
            self._store.set(f"{self._num_samples - 1}/{self._rank}", Sample(end_s - start_s, named).to_text())
            if self._rank == 0:
                self._collect(is_last=False)
                if len(self._read) >= self._next_look:
                    self._next_look *= 2
                    # All evaluations during the loop share half of the error rate. The last evaluation has the other
                    # half.
                    self._alpha /= 2
                    if (verdict := self._judge(self._alpha)).exit_code != UNKNOWN:
                        self._report(verdict, f"watch: step {self._num_steps}: ")

    def _collect(self, is_last: bool) -> None:
        """Read complete samples of all ranks from the store; the last time also samples that some ranks lack."""
        while (number := len(self._read)) < self._num_samples:
            keys = [f"{number}/{rank}" for rank in range(self._num_ranks)]
            if is_last:
                keys = [key for key in keys if self._store.check([key])]
            elif not self._store.check(keys):
                return
            texts = self._store.multi_get(keys) if keys else []
            self._read.append({int(key.split("/")[1]): Sample.of(text) for key, text in zip(keys, texts, strict=True)})
            for key in keys:
                self._store.delete_key(key)

    def _judge(self, alpha: float) -> LatenessVerdict:
        keys = [f"host/{rank}" for rank in range(self._num_ranks)]
        known = [self._store.check([key]) for key in keys]
        hosts = [self._store.get(key).decode() if is_known else "" for key, is_known in zip(keys, known, strict=True)]
        more = f"Use a smaller every= than {self._every}, or more steps than {self._num_steps}."
        return judge_arrivals(arrivals_of(self._read, hosts), SAMPLES, more, alpha)

    def _report(self, verdict: LatenessVerdict, begin: str) -> None:
        self.late, self.lines = verdict.late, verdict.lines
        print("\n".join(f"{begin}{line}" for line in verdict.lines), file=sys.stderr, flush=True)


def watch(every: int = 100, *, mesh: DeviceMesh | None = None) -> Watch:
    """Watch the loop of a `with` block, and report which rank arrives last in each group, how often, and by how much.

    The loop calls `step()` of the result once per step. Rank 0 prints to stderr: after 8, 16, 32, ... sampled steps,
    and at the end. All ranks must enter the block. An exception in the block ends the watch on its rank; no other rank
    waits for that rank. At its own end a rank waits at most 10 s (1 s after an exception) for the collectives of its
    sampled steps that are still running, and rank 0 at most 10 s for the last samples.

    Args:
        every: one step in `every` steps is timed. Other steps are unchanged.
        mesh: names the groups of its mesh dims in messages.

    Raises:
        UserError: `every` is not a positive integer, no process group exists, or only a fake process group, or
            collectives run on an accelerator, where a host's call does not show when its device arrives.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UserError(f"watch(every={every!r}) is not valid; give a positive integer such as every=100")
    if not dist.is_initialized():
        raise UserError("watch() needs a process group; call torch.distributed.init_process_group first")
    _require_host_backend()
    if "fake" in str(dist.get_backend_config()):
        raise UserError("watch() needs ranks that share a store; use a process group of gloo, not a fake process group")
    try:
        return Watch(every, mesh)
    except Unsupported as reason:
        raise UserError(str(reason)) from reason


def _require_host_backend() -> None:
    accelerator = Accelerator.current()
    if accelerator and accelerator.backend and accelerator.backend in str(dist.get_backend_config()):
        raise UserError(
            f"watch() times collectives of hosts, and {accelerator.backend} runs them on {accelerator.type} devices; "
            "record Flight Recorder or NCCL Inspector files and run `distbench watch FILE...` (docs/watch.md)"
        )
