"""What srun sets, as recorded variables: which processes are ranks, and how many there are on a node."""

import pytest

from distbench.launch.rendezvous import first_host, joined_ranks, slurm_port, tasks_on_node

STEP = {"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[03-05]", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}


def test_a_step_of_one_task_is_no_rank() -> None:
    """`srun --pty bash` on a node of eight devices: ranks are ours to start there, on all of them."""
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert joined_ranks(alone) is None
    assert joined_ranks(alone | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert joined_ranks({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None, "a batch script is no step"


def test_ranks_of_a_node_are_counted_without_ntasks_per_node() -> None:
    joined = joined_ranks(STEP)
    assert joined is not None and (joined.rank, joined.world_size, joined.address) == (5, 11, "gpu03:20000")
    assert joined.variables["LOCAL_WORLD_SIZE"] == "4" and joined.variables["LOCAL_RANK"] == "1"


def test_launches_at_the_same_time_meet_at_ports_of_their_own() -> None:
    started = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("7", "8") for step in ("0", "1")]
    assert {slurm_port(one) for one in started} == {20007, 20108, 20008, 20109}
    assert slurm_port({"SLURM_JOB_ID": "4294967294"}) < 30_000


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[03-07,9],x1", "gpu03"),
        ("x1,gpu[03-07]", "x1"),
        ("rack[1-2]n[04,7]", "rack1n04"),
        ("a[9]-b,c", "a9-b"),
        ("node-1.example.org", "node-1.example.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("message", "node", "count"),
    [("4(x2),3", "2", 3), ("8", "0", 8), ("2(x3),1", "3", 1), ("", "0", 6), ("4", "9", 6), ("4", "x", 6)],
)
def test_tasks_by_node(message: str, node: str, count: int) -> None:
    environ = {"SLURM_STEP_TASKS_PER_NODE": message, "SLURM_NODEID": node, "SLURM_NTASKS_PER_NODE": "6"}
    assert tasks_on_node(environ) == count
