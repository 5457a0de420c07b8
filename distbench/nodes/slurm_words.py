"""What Slurm says of a job, in its own words, and what they mean to whoever waits for it."""

import re
from dataclasses import dataclass

# Not one of Slurm's words: its controller does not say.
UNANSWERED = "UNANSWERED"
# Slurm's words for a job that is over, of squeue(1), JOB STATE CODES; each version has further ones for what is not.
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
OVER |= {"REVOKED", "TIMEOUT", ""}
# Why a job waits that will wait for ever unless somebody changes it, of squeue(1), JOB REASON CODES.
IN_VAIN = {
    "PartitionNodeLimit": "its partition has fewer nodes; give fewer --nodes, or another partition",
    "PartitionTimeLimit": "its partition gives no job so much time; give less with --launcher-args '--time=MINUTES'",
    "BadConstraints": "no node is as asked for; change --launcher-args",
    "InvalidAccount": "there is no such account; give one with --launcher-args '--account=NAME'",
    "InvalidQOS": "there is no such quality of service; give one with --launcher-args '--qos=NAME'",
    "AccountNotAllowed": "its partition takes no such account; give another one with --launcher-args '--account=NAME'",
    "QOSNotAllowed": "there it may not have that quality of service; give another with --launcher-args '--qos=NAME'",
    "DependencyNeverSatisfied": "what it depends on has failed; leave --dependency out",
    **dict.fromkeys(("AssocMaxNodePerJobLimit", "QOSMaxNodePerJobLimit"), "no job of yours gets so many --nodes"),
    **dict.fromkeys(
        ("AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit"),
        "no job of yours gets so much time; give less with --launcher-args '--time=MINUTES'",
    ),
}
# What may be done about a reason that may pass.
ADVICE = {
    "PartitionConfig": "its partition may never have so many nodes or CPUs; Ctrl-C cancels it",
    "JobHeldUser": "it is held, as asked for; `scontrol release {job_id}` lets it begin",
    "JobHeldAdmin": "whoever runs this cluster holds it; ask there",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
}
WHY = {
    "TIMEOUT": "its time limit was over; give it more with --launcher-args '--time=MINUTES'",
    "NODE_FAIL": "a node was lost; Slurm's own log says which (scontrol show job {job_id})",
    "CANCELLED": "it was cancelled",
    "OUT_OF_MEMORY": "a node had no memory left",
    "PREEMPTED": "another job took its nodes",
}
COMPLETED, PENDING = "COMPLETED", "PENDING"
FIELD = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|StartTime)=([^\s,]*(?:, ?[^\s,]+)*)")


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job.

    Args:
        word: Slurm's own, such as RUNNING; "" where it does not know the job any more.
        exit_code: of the script, once it has ended.
        reason: why it waits, or why it ended, in Slurm's words.
        begins: when Slurm expects it to begin; "" where it does not say.
    """

    word: str
    exit_code: int = 0
    reason: str = ""
    begins: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, however."""
        return self.word in OVER

    @property
    def why(self) -> str:
        """Slurm's word for the reason, without what may stand behind it (`ReqNodeNotAvail, UnavailableNodes:n1`)."""
        return self.reason.partition(",")[0]
