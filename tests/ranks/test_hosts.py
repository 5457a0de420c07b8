"""Hosts that differ, or are gone: what is refused and what is only said, by the names of ranks and hosts."""

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distbench.launch.display import Plain
from distbench.ranks import hosts as alike
from distbench.ranks import lost_ranks
from distbench.ranks.agreement import Agreement
from distbench.ranks.hosts import (
    GivenToRank,
    HostFacts,
    cautions_about,
    mixed_devices,
    require_same_device,
    require_same_job,
)
from distbench.ranks.lost_ranks import Presence
from distbench.records.run_file import Run
from distbench.report.sections import warnings_of
from distbench.spec import Job, Settings, UserError

Change = Callable[[GivenToRank], GivenToRank]
# Of four ranks: what each of rank 0's values is on the others.
OTHERS = {"host": ("a", "b", "b"), "boot": ("1", "2", "2")}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Whose scenario file imports another one beside it, on a host called a."""
    (tmp_path / "mine.py").write_text("import layers\n")
    (tmp_path / "layers.py").write_text("WIDTH = 64\n")
    layers = ModuleType("layers")
    layers.__file__ = str(tmp_path / "layers.py")
    monkeypatch.setitem(sys.modules, "layers", layers)
    boot = tmp_path / "boot_id"
    boot.write_text("1\n")
    monkeypatch.setattr(alike, "BOOT_ID", boot)
    monkeypatch.setattr(os, "uname", lambda: type("Name", (), {"nodename": "a"}))
    files = {"file": str(tmp_path / "mine.py"), "run_file": "", "log_dir": ""}
    where = {"variants": [{}], "axes": [], "mesh": {"tp": 4}, "device": "cpu", "settings": Settings()}
    return Job(run_id="1", invocation_id="1", scenario="mine", timeout_s=1.0, started_at=0.0, **files, **where)


def gather_with(change: Change, code: str | None = None) -> Callable[[Any], list[Any]]:
    """As four ranks on two hosts would: those on host b told something else; `code` is a digest of theirs."""

    def gather(own: Any) -> list[Any]:
        if isinstance(own, str):
            return [own, own, *(2 * [own if code is None else code])]
        others = [replace(own, host=host, boot=boot) for host, boot in zip(*OTHERS.values(), strict=True)]
        return [own, others[0], *map(change, others[1:])]

    return gather


def as_it_is(message: GivenToRank) -> GivenToRank:
    return message


def test_ranks_that_were_given_the_same_may_begin(job: Job) -> None:
    assert require_same_job(job, gather_with(as_it_is)) == ("a", "a", "b", "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: replace(own, torch="2.11.0"), "torch of ranks 2, 3 (host b) is 2.11.0, of rank 0 (host a) "),
        (
            lambda own: replace(own, inputs={**own.inputs, "the scenario file": "0"}),
            "the scenario file of ranks 2, 3 (host b) differs from rank 0's (host a); give all ranks the same",
        ),
        (
            lambda own: replace(own, imported=dict.fromkeys(own.imported, "0")),
            "layers.py, which the scenario file imports, of ranks 2, 3 (host b) differs from rank 0's",
        ),
        (
            lambda own: replace(own, host="a"),
            "ranks 0 and 2 are on different hosts with the same name a; give each host a different name",
        ),
    ],
)
def test_what_hosts_were_given_differently_is_named(
    job: Job, change: Callable[[GivenToRank], GivenToRank], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        require_same_job(job, gather_with(change))
    assert message in str(refused.value)


def test_another_distbench_on_a_host_is_named(job: Job) -> None:
    with pytest.raises(UserError, match=r"distbench's own code of ranks 2, 3 \(host b\) differs from rank 0's"):
        require_same_job(job, gather_with(as_it_is, code="0"))


def test_a_file_that_one_rank_alone_imports_is_no_difference(job: Job) -> None:
    require_same_job(job, gather_with(lambda own: replace(own, imported={})))
    require_same_job(job, gather_with(lambda own: replace(own, imported={**own.imported, "more.py": "0"})))


def test_of_many_ranks_a_few_are_named() -> None:
    hosts = ["a"] * 8 + ["b"] * 16
    assert alike.named(range(8, 24), hosts) == "ranks 8, 9, 10, 11, 12, 13, 14, 15 and 8 more (host b)"
    assert alike.named([3], ["a"] * 4) == "rank 3"


def test_clocks_and_devices_that_differ_are_said_before_and_after() -> None:
    first = HostFacts(1000.0, "H100", 8)
    others = {"b": HostFacts(1001.0, "H100", 8), "c": HostFacts(1000.0 - 3600, "H100", 8)}
    (clock,) = cautions_about({"a": first, **others})
    assert (
        clock == "the clock of host c is 60 min behind host a's; dates are from host a, and measured times are correct"
    )
    fewer, *_ = cautions_about({"a": first, "b": HostFacts(1000.0, "H100", 4)})
    assert fewer.startswith("ranks on host b have access to 4 devices, on host a to 8")
    header = {"type": "run", "job": {"scenario": "x"}, "environment": {"cautions": [clock]}}
    assert f"warning: {clock}" in warnings_of([Run(Path("x"), header, [], [], None)])


def test_devices_of_one_host_that_differ_are_said() -> None:
    names = ["H100", "H100", "H100", "A100", "H100", "H100"]
    assert mixed_devices(["a"] * 4 + ["b"] * 2, names) == [
        "devices of host a differ: H100 (ranks 0, 1, 2), A100 (rank 3); its ranks wait for the slower device"
    ]
    assert mixed_devices(["a", "a", "b"], ["A", "A", "B"]) == []


def asked_together(devices: Sequence[str]) -> list[str]:
    """What each rank of a job is told, ranks being threads with torch's own store."""
    store, message = torch.distributed.HashStore(), [""] * len(devices)

    def ask(rank: int) -> None:
        try:
            require_same_device(torch.distributed.PrefixStore("job", store), rank, len(devices), devices[rank])
        except UserError as error:
            message[rank] = str(error)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return message


def test_a_host_without_its_driver_is_named_to_all_before_ranks_form_groups() -> None:
    """Its command takes the CPU, and its ranks would form other groups than those that wait for them."""
    assert asked_together(["cuda"] * 4) == [""] * 4
    (message,) = set(asked_together(["cuda", "cuda", "cpu", "cpu"]))
    assert message.startswith("the device of ranks 2, 3 is cpu, of rank 0 cuda; set --device, or run")


def test_a_caution_is_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    Plain("mine", sys.stderr).event({"event": "caution", "text": "the clock of host b is wrong"})
    assert capsys.readouterr().err == "mine: warning: the clock of host b is wrong\n"


class Silent(socket.socket):
    """A connection whose other end answers no more."""

    def recv(self, *_: Any) -> bytes:  # type: ignore[override]
        raise OSError(errno.ETIMEDOUT, "timed out")


def test_a_host_whose_cable_is_cut_is_named_at_once_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives up a silent connection after 25 s; nobody waits any longer then."""
    monkeypatch.setattr(lost_ranks, "GONE_AFTER_S", 1000.0)
    message: list[str] = []
    alone = Presence({}, 0, ("a",), "", message.append)  # type: ignore[arg-type]
    alone._hosts = ("a", "a", "b", "b")
    with Silent() as link:
        alone._ranks[link] = 2
        assert alone._end_of(link) == errno.ETIMEDOUT
        del alone._ranks[link]
        alone._tell(2, is_silent=True)
        alone._rank = 3
        alone._follow_first(link)
    assert message == [
        "host b (ranks 2, 3) no longer responds to host a: b or the network is down",
        "host a (ranks 0, 1) no longer responds to host b: a or the network is down",
    ]
    seconds = lost_ranks.KEEP_ALIVE
    assert seconds["TCP_KEEPIDLE"] + seconds["TCP_KEEPINTVL"] * seconds["TCP_KEEPCNT"] <= 28


def test_rank_0_whose_store_ends_with_it_leaves_last() -> None:
    """Under srun, of two ranks that fail alike, rank 0 went first, and rank 1 told of a lost connection instead."""
    store = torch.distributed.HashStore()
    ranks = [object.__new__(Agreement) for _ in range(2)]
    for rank, one in enumerate(ranks):
        vars(one).update(_store=store, _rank=rank, _hosts=("a", "b"), _num_failures=0)
    error, returned = UserError("call 'nap' returns nothing"), list[int]()

    def fail(rank: int) -> None:
        assert ranks[rank].user_error(error) is error
        returned.append(rank)

    ranks[1]._publish("by the user", str(error))  # has failed, and has not looked whether rank 0 has
    first = threading.Thread(target=fail, args=(0,))
    first.start()
    first.join(0.2)
    assert first.is_alive() and not returned
    fail(1)
    first.join(5)
    assert sorted(returned) == [0, 1]  # rank 0 may return as soon as rank 1 says that it leaves
