"""Where ranks and nodes meet: what is wrong with the address is refused or said, and who says it."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import DATA

from distbench.cli import options as say_once
from distbench.cli.main import main
from distbench.launch import nodes, rendezvous
from distbench.launch.nodes import NodeLaunch, address_in
from distbench.launch.rendezvous import Joined, Meeting, joined_ranks, require_address
from distbench.spec import UserError


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["run", str(DATA / "tiny.py"), *words])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("--node-rank 1 --master-addr host", "host:29500"),
        ("--master_addr=host --master_port=7", "host:7"),
        ("--rdzv-endpoint host:8 --rdzv-backend c10d", "host:8"),
        ("--rdzv_endpoint=host", "host:29500"),
        ("--rdzv-endpoint [::1]:8", "::1:8"),
        ("--rdzv-endpoint=[fe80::1]", "fe80::1:29500"),
        ("", ""),
        ("--standalone", ""),
    ],
)
def test_where_hosts_of_torchrun_meet(words: str, address: str) -> None:
    assert address_in(words.split()) == address


def test_a_first_host_without_an_address_is_refused_before_torchrun_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.0)
    monkeypatch.setattr(rendezvous.require_host, "__defaults__", (0.0,))
    words = ("--launcher", "torchrun", "--launcher-args", "--node-rank 1 --master-addr no-such-host.invalid")
    code, text = run("--nodes", "2", *words)
    assert code == 2 and "MASTER_ADDR=no-such-host.invalid does not resolve on this host" in text


def test_a_node_that_waits_says_so_once_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun itself would wait for minutes without a word; where it has started ranks, they speak."""
    monkeypatch.setattr(nodes, "NOTICE_AFTER_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.01)
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{there.getsockname()[1]}"
        for sentence in ("does not respond (", "for 2 nodes at 127.0.0.1:"):
            requested = NodeLaunch(("tiny",), 2, 1, "cpu", Path("results"), "distbench-tiny", (), timeout_s=0.05)
            message: list[str] = []
            process = FakeTorchrun()
            watch = nodes._Watch(address, requested, message.append)
            monkeypatch.setattr(nodes, "_has_children", lambda pid: False)
            watch.follow(process)  # type: ignore[arg-type]
            assert len(message) == 1 and sentence in message[0] and sentence in watch.given_up and process.is_killed
            there.listen()
        monkeypatch.setattr(nodes, "_has_children", lambda pid: True)
        watch.follow(FakeTorchrun())  # type: ignore[arg-type]
        assert len(message) == 1


class FakeTorchrun:
    """A process that runs until it is killed."""

    pid, is_killed = 0, False

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self.is_killed = True


def test_a_process_that_started_others_is_told_from_one_that_waits(tmp_path: Path) -> None:
    assert not nodes._has_children(os.getpid()) or any(
        path.read_text() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")
    )
    assert nodes._has_children(1 << 30), "where the system does not say, ranks speak for themselves"


@pytest.mark.long
def test_rank_0_must_be_where_the_others_look_for_it() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this host is not available .*Address already in use"):
            rendezvous.require_own(f"127.0.0.1:{port}")
    rendezvous.require_own(f"127.0.0.1:{port}")
    # RFC 5737 keeps this network for documentation.
    elsewhere = Joined(0, 2, {"MASTER_PORT": str(port)}, f"192.0.2.77:{port}")
    with pytest.raises(UserError, match="data sent to that address does not reach this host"):
        require_address(elsewhere, wait_s=0)
    require_address(replace(elsewhere, rank=1), wait_s=0)


def test_what_passes_on_what_is_sent_to_rank_0_may_have_an_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_is_local", lambda host: False)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    rendezvous.require_own(f"127.0.0.1:{port}")


def test_a_node_that_only_slurm_knows_by_name_is_met_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(rendezvous, "address_by_slurm", {"no-such-host.invalid": "10.0.0.7"}.get)
    result = require_address(Joined(1, 2, {"RANK": "1"}, "no-such-host.invalid:20007"))
    assert (result.address, result.variables["MASTER_ADDR"]) == ("10.0.0.7:20007", "10.0.0.7")


def test_an_address_that_is_none_is_refused_before_torch_waits_for_it() -> None:
    with pytest.raises(UserError, match=r"MASTER_ADDR=no-such-host.invalid does not resolve on this host"):
        require_address(Joined(1, 2, {}, "no-such-host.invalid:29500"), wait_s=0)
    require_address(Joined(1, 2, {}, "127.0.0.1:29500"), wait_s=0)
    require_address(Joined(1, 2, {}, ":1"), wait_s=0)


def test_ranks_of_one_slurm_step_know_one_name_of_their_launch() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "a"}
    launches = {joined.launch for rank in "01" if (joined := joined_ranks({**step, "SLURM_PROCID": rank}))}
    assert launches == {"slurm-7.2"}


def test_a_rank_that_waits_says_once_where_and_what_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        meeting = Meeting(Joined(1, 2, {"LOCAL_RANK": "0"}, address))
        meeting.waited(14)
        assert not capsys.readouterr().err
        meeting.waited(21)
        meeting.waited(22)
        message = capsys.readouterr().err
        assert (
            message.count("\n") == 1
            and f"rank 1 has waited 21 s at {address}" in message
            and "this address does not respond" in message
        )
        listening.listen()
        Meeting(Joined(2, 4, {"LOCAL_RANK": "0"}, address)).waited(21)
        assert "The address responds" in capsys.readouterr().err
        Meeting(Joined(3, 4, {"LOCAL_RANK": "1"}, address)).waited(21)
        Meeting(None).waited(21)
        assert not capsys.readouterr().err


def test_what_ranks_of_a_host_say_alike_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others speak while the first one, who has said it, still stays."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "3"}

    def others(seconds: float) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(say_once.time, "sleep", lambda seconds: None)
        say_once.say_once(f"mesh of {os.getpid()} is wrong")
        say_once.say_once(f"rank 1 of {os.getpid()} alone is wrong")

    for name, value in {**address, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(say_once.time, "sleep", others)
    say_once.say_once(f"mesh of {os.getpid()} is wrong")
    message = [f"mesh of {os.getpid()} is wrong", f"rank 1 of {os.getpid()} alone is wrong"]
    assert capsys.readouterr().err.splitlines() == message
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    say_once.say_once("without ranks")
    assert capsys.readouterr().err == "without ranks\n"
