"""Ranks that share CPUs: keep the kernel from preempting whichever of them runs."""

import os

from distbench.spec.devices import is_accelerator

THREADS_PER_RANK = 2  # a rank's own and gloo's
POLICIES = ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")


def calm_scheduler(device: str) -> None:
    """Put this process, and all threads that it starts from here on, under SCHED_BATCH where CPUs are short.

    Under the default policy every thread that wakes up may preempt the one that runs. With more threads than CPUs
    that alone made an all_gather of 1 MB (4 gloo ranks on 2 CPUs) take 3.2 ms instead of 1.5, with quartiles 3.3 ms
    apart instead of 0.4. SCHED_BATCH (sched(7)) needs no privilege and only forgoes that preemption. Ranks that
    compute on an accelerator are left alone.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_accelerator(device) or not hasattr(os, "SCHED_BATCH") or policy_name() != "other":
        return
    if local_ranks > 1 and local_ranks * THREADS_PER_RANK > len(os.sched_getaffinity(0)):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def policy_name() -> str | None:
    """This process's scheduling policy: "other" (the default), "batch", "fifo" ...; None where systems have none."""
    names = {getattr(os, name): name.removeprefix("SCHED_").lower() for name in dir(os) if name in POLICIES}
    return names.get(os.sched_getscheduler(0)) if hasattr(os, "sched_getscheduler") else None
