"""Scenario files that go wrong: as they are read, as they are imported, in what they return, and in a step."""

from benchmarks.faulty_call import FaultyCall

HEAD = "import os, sys\nfrom distbench.spec import *\n"
TOY = "    return Scenario(collectives=(Collectives(ops=('all_gather',), sizes_bytes=(1024,)),))\n"
FUNCTION = "@scenario(mesh={'tp': 2})\ndef x(*, n: int = 1) -> Scenario:\n    '''x'''\n"


def checked(name: str, source: str, says: str, code: int | tuple[int, ...] = 2, timeout_s: float = 60) -> FaultyCall:
    """A file that `distbench check` reads, and imports in a child process."""
    return FaultyCall(f"scenario file: {name}", "distbench check x.py", says, code, {"x.py": HEAD + source}, timeout_s)


READ = (
    checked("a line that is no Python", "def x(:\n", "line 3 is not valid Python"),
    checked(
        "a header that must be run", "N = 2\n@scenario(mesh={'tp': N})\ndef x() -> Scenario: ...\n", "is not a literal"
    ),
    checked("a header without a mesh", "@scenario()\ndef x() -> Scenario: ...\n", "needs a mesh"),
    checked(
        "a header with what nobody knows",
        "@scenario(mesh={'tp': 2}, colour=1)\ndef x() -> Scenario: ...\n",
        "has no argument 'colour'",
    ),
    checked("a mesh that is a list", "@scenario(mesh=[2])\ndef x() -> Scenario: ...\n", "is not valid"),
    checked(
        "a parameter without a default", "@scenario(mesh={'tp': 2})\ndef x(*, a) -> Scenario: ...\n", "keyword-only"
    ),
    checked("a name twice", FUNCTION + TOY + FUNCTION + TOY, "x", (0, 2)),
    checked("an axis of nothing", "@scenario(mesh={'tp': 2}, axes={'n': ()})\ndef x(*, n: int = 1): ...\n", "axes="),
)
IMPORTED = (
    checked("a package that is not there", "import torchh\n" + FUNCTION + TOY, "torchh"),
    checked("raises", "raise ValueError('not today')\n" + FUNCTION + TOY, "not today"),
    checked("exits", "sys.exit(0)\n" + FUNCTION + TOY, "."),
    checked("is interrupted", "raise KeyboardInterrupt\n" + FUNCTION + TOY, "."),
    checked("dies", "os._exit(7)\n" + FUNCTION + TOY, "."),
    checked("aborts in C", "os.abort()\n" + FUNCTION + TOY, "SIGABRT"),
    checked("recurses", "def f(): f()\nf()\n" + FUNCTION + TOY, "RecursionError"),
    checked(
        "an error of a megabyte",
        "raise ValueError('\\udcff\\x1b[31m' + 'y' * 1_000_000)\n" + FUNCTION + TOY,
        "ValueError",
    ),
    checked(
        "an error that cannot be shown",
        "class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E\n" + FUNCTION + TOY,
        "E",
    ),
    checked(
        "prints a megabyte", "print('x' * 1_000_000)\nprint('{}', file=sys.stderr)\n" + FUNCTION + TOY, "x on tp=2", 0
    ),
    checked("closes standard output", "os.close(1)\n" + FUNCTION + TOY, ".", (0, 2)),
    checked("has no standard output", "sys.stdout = None\n" + FUNCTION + TOY, ".", (0, 2)),
    checked("changes the folder", "os.chdir('/')\n" + FUNCTION + TOY, "x on tp=2", 0),
    checked(
        "forks", "import time\nif os.fork() == 0:\n    time.sleep(300)\n    os._exit(0)\n" + FUNCTION + TOY, ".", (0, 2)
    ),
    checked("warnings as errors", "import warnings\nwarnings.simplefilter('error')\n" + FUNCTION + TOY, "x on tp=2", 0),
    checked("reads standard input", "sys.stdin.read()\n" + FUNCTION + TOY, "x on tp=2", (0, 2)),
    checked("empties the environment", "os.environ.clear()\n" + FUNCTION + TOY, "x on tp=2", 0),
    checked("no function of that name", FUNCTION + TOY + "del x\n", "x"),
)
RETURNED = (
    checked("returns nothing", FUNCTION + "    return None\n", "returned|Scenario"),
    checked("returns text", FUNCTION + "    return 'x'\n", "returned|Scenario"),
    checked(
        "a model without a batch", FUNCTION + "    return Scenario(build_model=lambda: None)\n", "make_batch|batch"
    ),
    checked(
        "a model that is none",
        FUNCTION + "    return Scenario(build_model=lambda: 3, make_batch=lambda: (1, 2), loss=print)\n",
        ".",
    ),
    checked("raises in the function", FUNCTION + "    raise RuntimeError('no data today')\n", "no data today"),
    checked("exits in the function", FUNCTION + "    sys.exit(3)\n", "."),
)

LAUNCHED = tuple(
    FaultyCall(
        f"scenario file: {name}",
        "distbench run x.py --quick --timeout 90",
        says,
        (1, 2),
        {"x.py": HEAD + FUNCTION + f"    return Scenario({given})\n"},
        240,
    )
    for name, given, says in (
        ("declares nothing", "", "nothing|declares"),
        (
            "an operation that nobody knows",
            "collectives=(Collectives(ops=('all_scatter',), sizes_bytes=(8,)),)",
            "all_scatter",
        ),
        ("sizes that are none", "collectives=(Collectives(ops=('all_gather',), sizes_bytes=(-8,)),)", "size|-8"),
    )
)

STEP = """import ctypes, os, signal, subprocess, sys, threading, time
import torch
import torch.nn.functional as F
from torch import nn
from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Odd(Exception):
    def __str__(self):
        raise ValueError("cannot be shown")


def recurse(n):
    return recurse(n + 1)


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.linear, self.case = nn.Linear(8, 8), case

    def forward(self, x):
        rank = int(os.environ["RANK"])
        if self.case == 2:
            DEED
        return self.linear(x)


@scenario(mesh={"dp_shard": 2}, axes={"case": (1, 2, 3)})
def deeds(*, case: int = 1) -> Scenario:
    return Scenario(
        build_model=lambda: Model(case),
        make_batch=lambda: (torch.ones(4, 8), torch.ones(4, 8)),
        loss=F.mse_loss,
        plan=ParallelPlan(fsdp=FsdpPlan()),
    )
"""
RUN = "distbench run deeds.py --quick --passes 1 --budget 1 --timeout 40 --results out"


def step(name: str, deed: str, says: str, code: int | tuple[int, ...] = 1, num_ok: int = 2) -> FaultyCall:
    """Three steps, the second of which does something; the others must come out ok."""
    source = STEP.replace("DEED", deed.replace("\n", "\n            "))
    return FaultyCall(f"step: {name}", RUN, says, code, {"deeds.py": source}, 300, num_ok)


STEPS = (
    step("an error of three megabytes", "raise ValueError('y' * 3_000_000)", "case=2 is raised"),
    step(
        "an error of half characters and codes",
        "raise ValueError('\\udcff \\x1b[31m\\n::error::x')",
        "case=2 is raised",
    ),
    step("an error that cannot be shown", "raise Odd", "case=2.*Odd"),
    step(
        "an error of a group", "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])", "case=2 is raised .*two"
    ),
    step("exits with 0", "sys.exit(0)", "case=2"),
    step("exits on one rank", "if rank == 1:\n    sys.exit('enough')", "case=2.*(enough|SystemExit)"),
    step("is interrupted", "raise KeyboardInterrupt", "case=2"),
    step("is cancelled", "import asyncio\nraise asyncio.CancelledError", "case=2"),
    step("dies with 0", "os._exit(0)", "case=2|exit code 0"),
    step("dies with 7 on one rank", "if rank == 1:\n    os._exit(7)", "case=2.*exit code 7"),
    step("aborts in C", "os.abort()", "case=2.*SIGABRT"),
    step("reads address 0", "if rank == 1:\n    ctypes.string_at(0)", "case=2.*SIGSEGV"),
    step("recurses", "recurse(0)", "case=2 is raised .*Recursion"),
    step("asks for all memory", "torch.empty(1 << 50)", "case=2 is raised"),
    step(
        "hangs and heeds no signal",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
        "case=2.*made no progress",
    ),
    step("waits for one rank", "if rank == 0:\n    torch.distributed.barrier()", "case=2"),
    step("prints megabytes", "print('x' * 5_000_000)\nsys.stderr.write('y' * 5_000_000)", "3 ok", 0, 3),
    step(
        "closes its streams",
        "os.close(1) if self.training and not os.environ.pop('CLOSED', '') else None\nos.environ['CLOSED'] = '1'",
        "",
        (0, 1),
    ),
    step("changes the folder", "os.chdir('/')", "3 ok", 0, 3),
    step(
        "leaves a process behind",
        "os.environ.setdefault('LEFT', '') or os.environ.update(LEFT='1') or subprocess.Popen(['sleep', '300'])",
        "3 ok",
        0,
        3,
    ),
    step("leaves a thread behind", "threading.Thread(target=time.sleep, args=(300,)).start()", "3 ok", 0, 3),
    step(
        "ends the launcher",
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(5)",
        "the launcher was killed by SIGKILL",
    ),
    step("ends the process group", "torch.distributed.destroy_process_group()", "case=2", 1, 1),
    step("deletes its own file", "os.path.exists('deeds.py') and rank == 0 and os.remove('deeds.py')", "3 ok", 0, 3),
    step("a loss that is not a number", "return self.linear(x) * float('nan')", "case=2 is wrong .*(nan|loss)"),
    step("another shape", "return self.linear(x)[:, :3]", "case=2"),
    step("no tensor", "return 'x'", "case=2 is raised"),
    step("a clock that stands still", "time.perf_counter = time.monotonic = time.time = lambda: 0.0", "", (0, 1), 1),
)
FAULTS = (*READ, *IMPORTED, *RETURNED, *LAUNCHED, *STEPS)
