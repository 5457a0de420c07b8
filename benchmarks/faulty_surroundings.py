"""Surroundings that fail: environment variables, limits, full and missing folders, streams, and neighbours."""

from benchmarks.faulty_call import FaultyCall
from benchmarks.faulty_files import STEPS, TOY

REPORT, GATE = "distbench report good.jsonl", "distbench gate good.jsonl $GOLD/collectives.jsonl"
RUN = "distbench run toy.py --quick --timeout 90 --results out"
PLAN = 'distbench redistribute "S(0)R" "RS(0)" --shape 64,64 --mesh 2x2'
FILES = {"good.jsonl": STEPS, "toy.py": TOY}
FULL = 'mkdir t; mount -t tmpfs -o size=4k tmpfs t; head -c 4096 /dev/zero > t/x; trap "umount t" EXIT\n'


def with_(name: str, command: str, message: str = "", code: int | tuple[int, ...] = 0) -> FaultyCall:
    """A command that starts no ranks."""
    return FaultyCall(f"surroundings: {name}", command, message, code, FILES)


def run(name: str, command: str, message: str = "2 ok", code: int | tuple[int, ...] = 0, num_ok: int = 2) -> FaultyCall:
    """Two collectives on two ranks."""
    return FaultyCall(f"a run with {name}", command, message, code, FILES, 240, num_ok)


SHORT = (
    with_("no HOME", f"unset HOME; {REPORT} --plots p", "plots written"),
    with_("a HOME that is gone", f"HOME=/none {REPORT} --plots p", "plots written"),
    with_("a TMPDIR that is gone", f"TMPDIR=/none {REPORT} --page p.html", "page written"),
    with_("a full TMPDIR", f"{FULL}TMPDIR=$PWD/t {REPORT} --page p.html", "page written"),
    with_("matplotlib's folder a file", f"MPLCONFIGDIR=good.jsonl {REPORT} --plots p", "plots written"),
    with_("a backend of matplotlib that is none", f"MPLBACKEND=none {REPORT} --plots p", "plots written"),
    with_("a locale that is not there", f"LANG=xx_XX LC_ALL=xx_XX {REPORT}"),
    with_("ASCII output", f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {REPORT} --format markdown"),
    with_("ASCII output by name", f"PYTHONIOENCODING=ascii {REPORT}"),
    with_("an output encoding that is none", f"PYTHONIOENCODING=none {REPORT}", "encoding", (0, 1, 2)),
    with_("a terminal of one column", f"COLUMNS=1 {REPORT}"),
    with_("a width that is no number", f"COLUMNS=wide {REPORT}"),
    with_("a dumb terminal", f"TERM=dumb NO_COLOR=1 FORCE_COLOR=1 {REPORT}"),
    with_("a time zone that is none", f"TZ=Nowhere/None {REPORT}"),
    with_("warnings as errors", f"PYTHONWARNINGS=error {REPORT} --page p.html", "page written"),
    with_("no assertions and no docstrings", f"PYTHONOPTIMIZE=2 {GATE}", "", (0, 4)),
    with_("no bytecode to write", f"PYTHONDONTWRITEBYTECODE=1 {REPORT}"),
    with_("a frozen hash", f"PYTHONHASHSEED=0 {GATE}", "", (0, 4)),
    with_(
        "no PATH",
        f"PATH= ; PYTHON=$(readlink -f /proc/self/exe) ; {REPORT}".replace(
            "; PYTHON=$(readlink -f /proc/self/exe) ", ""
        ),
    ),
    with_("no git", f"mkdir b; PATH=$PWD/b; {PLAN}"),
    with_(
        "a git that fails",
        'mkdir b; printf "#!/bin/sh\\nexit 9" > b/git; chmod +x b/git; PATH=$PWD/b:$PATH distbench doctor',
        "torch",
        (0, 1),
    ),
    with_(
        "a git that hangs",
        'mkdir b; printf "#!/bin/sh\\nexec sleep 300" > b/git; chmod +x b/git; PATH=$PWD/b:$PATH; '
        "timeout 60 $PYTHON -m distbench check toy.py",
        "toy on tp=2",
    ),
    with_("a repository of git that is none", f"GIT_DIR=/none {PLAN}"),
    with_("12 open files", f"ulimit -n 12; {REPORT}", "", (0, 2, 70)),
    with_("20 open files to plan with", f"ulimit -n 20; {PLAN}", "", (0, 2)),
    with_("300 MB of addresses", f"ulimit -v 300000; {REPORT}", "", (0, 2, 70)),
    with_("2 GB of addresses to plan with", f"ulimit -v 2000000; {PLAN}", "", (0, 2)),
    with_("files of 4 KB at most", f"ulimit -f 4; {REPORT} --page p.html", "File too large", 2),
    with_("20 s of CPU for a child that needs one", f"ulimit -t 20; {PLAN}", "", 0),
    with_("1 s of CPU", f"ulimit -t 1; {PLAN}", "", (0, 2, 137, 152)),
    with_("standard input closed", f"{PLAN} <&-"),
    with_("standard output closed", f"{REPORT} >&-"),
    with_("standard error closed", f"{GATE} 2>&-", "", (0, 4)),
    with_("all three closed", "distbench gate none none <&- >&- 2>&-", "", 2),
    with_("output full", f"{REPORT} > /dev/full", "standard output cannot be written", 2),
    with_("output full for a child", f"{PLAN} > /dev/full", "standard output cannot be written", 2),
    with_("a reader that leaves", f"set -o pipefail; {REPORT} --format json | head -c 10", "", (0, 141)),
    with_("a summary in no folder", f"GITHUB_STEP_SUMMARY=none/s {GATE} --github", "none/s cannot be written", 2),
    with_("an option that Click reads from nowhere", f"DISTBENCH_REPORT_FORMAT=xml {REPORT}"),
    with_("half of a launcher's variables", f"RANK=0 {RUN}", "WORLD_SIZE is missing", 2),
    with_("half of Slurm's variables", f"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=two {RUN}", "not numbers", 2),
    with_("a current folder that is gone", f"mkdir d; cd d; rmdir ../d; {PLAN}", "current folder no longer exists", 2),
    with_(
        "a module of one's own named like one of Python's",
        "echo 'raise ValueError(7)' > json.py; PYTHONPATH=$PWD:$PYTHONPATH distbench list --json",
        "ValueError: 7",
        70,
    ),
    with_("a startup file and inspection", f"PYTHONSTARTUP=none PYTHONINSPECT= {REPORT}"),
)
RUNS = (
    run("no HOME and no PATH of its own", f"unset HOME; {RUN}"),
    run("a TMPDIR that is gone", f"TMPDIR=/none {RUN}", "", (0, 1, 2), 0),
    run("a full TMPDIR", f"{FULL}TMPDIR=$PWD/t {RUN}", "", (0, 1, 2), 0),
    run(
        "/dev/shm gone",
        f"unshare --mount bash -c 'mount -t tmpfs -o size=0,nr_inodes=1 tmpfs /dev/shm; mount -o remount,ro /dev/shm; "
        f'"$PYTHON" -m distbench {RUN.removeprefix("distbench ")}\'',
    ),
    run("64 open files", f"ulimit -n 64; {RUN}", "", (0, 1, 2), 0),
    run("16 open files", f"ulimit -n 16; {RUN}", "", (0, 1, 2, 70), 0),
    run("3 GB of addresses", f"ulimit -v 3000000; {RUN}", "", (0, 1, 2, 70), 0),
    run("threads that are no number", f"OMP_NUM_THREADS=many {RUN}", "", (0, 1, 2), 0),
    run(
        "an interface of gloo that is not there",
        f"GLOO_SOCKET_IFNAME=none0 {RUN}",
        "none0|interface|gloo|rank",
        (1, 2),
        0,
    ),
    run("torch's logs asked for wrongly", f"TORCH_LOGS=none {RUN}", "TORCH_LOGS|none|rank", (0, 1, 2), 0),
    run("distributed debugging", f"TORCH_DISTRIBUTED_DEBUG=DETAIL {RUN}"),
    run("warnings as errors", f"PYTHONWARNINGS=error {RUN}", "", (0, 1, 2), 0),
    run("streams closed", f"{RUN} <&- >&- 2>&-", ""),
    run("a neighbour to the same folder", f"{RUN} & {RUN}; code=$?; wait; exit $code", "2 ok", 0, 4),
    run("its results folder removed and made again", f"mkdir out; {RUN}"),
    run("its folder moved", f"mkdir d; cp toy.py d; cd d; {RUN} & sleep 3; mv d e; wait $!", "", (0, 1, 2), 0),
    run("Ctrl-C", f"exec timeout --signal INT 5 $PYTHON -m {RUN}", "interrupted|2 ok", (0, 124, 130), 0),
    run("SIGTERM and the reader of its words gone", f"set -o pipefail; {RUN} 2>&1 | head -c 1", "", (0, 1, 141), 2),
)
FAULTS = (*SHORT, *RUNS)
