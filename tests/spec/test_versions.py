"""Which torch versions are supported: one constant, what pyproject and the docs state, and what a user is told."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import ROOT
from processes import Children

from distbench.cli import doctor
from distbench.cli.main import main
from distbench.spec import versions
from distbench.spec.errors import UserError
from distbench.torch_private import Unsupported, needs_newer, probe, require
from distbench.torch_private.probe import LOWEST

STATED = re.compile(r"torch (\d+\.\d+) to (\d+\.\d+)")
# Pages that state the supported versions.
PAGES = ("README.md", "docs/install.md")


def test_pyproject_and_the_docs_state_the_versions_of_the_constant() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions.REQUIREMENT in project["dependencies"]
    for page in PAGES:
        result = STATED.findall((ROOT / page).read_text())
        assert result and {f"torch {oldest} to {newest}" for oldest, newest in result} == {versions.SUPPORTED}, page


def test_the_product_states_the_bound_by_the_constant() -> None:
    """Else messages go stale. The versions of a defect, or of a source that was read, may be others."""
    of_something_else = {"simulate/allocator.py", "plans/parallelize.py"}
    oldest = ".".join(map(str, versions.OLDEST))
    stale = [
        path.relative_to(ROOT / "distbench").as_posix()
        for path in (ROOT / "distbench").rglob("*.py")
        for old, new in STATED.findall(path.read_text())
        if old == oldest and f"torch {old} to {new}" != versions.SUPPORTED
    ]
    assert set(stale) <= of_something_else


def test_the_torches_that_are_tried_begin_and_end_with_the_bound() -> None:
    from torches import RELEASES

    assert [versions.release(RELEASES[end]) for end in (0, -1)] == [versions.OLDEST, versions.NEWEST]
    assert versions.release(torch.__version__) in map(versions.release, RELEASES)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.10.1+cpu", "torch 2.10.1+cpu is older than torch 2.11 to 2.15"),
        ("2.16.0", "torch 2.16.0 is newer than torch 2.11 to 2.15"),
        ("3.0", "torch 3.0 is newer than torch 2.11 to 2.15"),
        ("2.11.0", ""),
        ("2.15.7+cu132", ""),
    ],
)
def test_a_torch_outside_of_the_bound_is_named_with_the_bound(version: str, message: str) -> None:
    result = versions.outside_of_support(version)
    assert message in result and bool(message) == bool(result)


def package(folder: Path, version: str, metadata: str | None) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('the tests import no stand-in')")
    (folder / "torch" / "version.py").write_text(f"__version__ = {version!r}\n")
    if metadata is not None:
        (folder / f"torch-{metadata}.dist-info").mkdir()
        (folder / f"torch-{metadata}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {metadata}\n")


@pytest.mark.parametrize(
    ("result", "metadata", "message"),
    [
        ("2.10.0", "2.10.0", ["torch 2.10.0 is older than torch 2.11 to 2.15", "pip install 'torch>=2.11,<2.16'"]),
        ("2.14.1", None, ["Python's path has two versions of torch", "loads 2.14.1", "remove one of them"]),
        ("2.14.1", "2.15.0", ["Python's path has two versions of torch", "loads 2.14.1", "is 2.15.0"]),
    ],
)
def test_a_torch_that_cannot_be_used_is_one_sentence_before_anything_starts(
    children: Children, tmp_path: Path, result: str, metadata: str | None, message: list[str]
) -> None:
    package(tmp_path, result, metadata)
    # Which commands refuse does not depend on why.
    commands = [["run", "tp_mlp", "--quick"], ["check", "tp_mlp"], ["simulate", "tp_mlp"]]
    for command in commands if metadata is None else commands[:1]:
        done = children.python("-m", "distbench", *command, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/bin"})
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert [text for text in message if text not in " ".join(done.stderr.split())] == [], done.stderr


def test_no_torch_at_all_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(UserError, match=r"torch is not installed; run pip install 'torch>=2.11,<2.16'"):
        versions.installed_torch()


@pytest.mark.long
def test_a_torch_without_distributed_is_one_sentence(children: Children, tmp_path: Path) -> None:
    """Its C++ part lacks what `torch.distributed.is_available` looks for."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as machinery\n"
        "plain = machinery.ExtensionFileLoader.exec_module\n"
        "def without(self, module):\n"
        "    plain(self, module)\n"
        "    if module.__name__ == 'torch._C':\n"
        "        del module._c10d_init, module._rpc_init\n"
        "machinery.ExtensionFileLoader.exec_module = without\n"
    )
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = children.python("-m", "distbench", "doctor", env=path)
    assert done.returncode == 1 and "was built without distributed support" in " ".join(done.stdout.split())
    done = children.python("-m", "distbench", "check", "tp_mlp", env=path)
    assert done.returncode == 2 and "was built without distributed support" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_feature_that_torch_is_too_old_for_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    feature = "FSDP2 on one SPMD mesh"
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    assert needs_newer(feature) == "needs torch 2.12 or newer, but this is 2.11.0+cpu"
    with pytest.raises(Unsupported, match=r"needs torch 2\.12 or newer"):
        require(feature)
    missing = {result.internal.feature for result in probe() if result.missing}
    assert feature in missing <= set(LOWEST), "and nothing has moved"


def test_one_of_several_names_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method that torch 2.15 renamed is there under either name, and reported under both where it is not."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    feature, names = "pipelines on a fake process group", ("_warmup_p2p", "_initialize_pipeline_distributed_state")
    if versions.release(torch.__version__) < (2, 12):
        pytest.skip("torch 2.11 does not have stages vote")
    (present,) = [name for name in names if hasattr(_PipelineSchedule, name)]
    require(feature)
    monkeypatch.delattr(_PipelineSchedule, present)
    with pytest.raises(Unsupported, match=f"{names[0]} or .*{names[1]}"):
        require(feature)


# As a torch breaks tracing in which c10d's operators take no kernels of ours.
TRACING_BROKEN = """
import torch
from distbench.worker import child, torch_checks

def broken(self, *_, **__):
    raise RuntimeError("no default backend")

torch.library.Library.impl = broken
torch_checks.FEATURES = {name: attempt for name, attempt in torch_checks.FEATURES.items() if "tracing" in name}
child.main("torch_behaviour")
"""


def test_doctor_deep_tries_behaviour_and_names_what_does_not_work(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = children.cli("doctor", "--deep", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("ok") and line.endswith("  works")]
    assert len(rows) == 7 and sum("redistribution by" in row for row in rows) == 4
    behaviour = children.run(children.forked_python, "-c", TRACING_BROKEN, check=True).stdout.splitlines()[-1]
    usable = [{"name": name, "ok": True, "found": "", "advice": ""} for name in doctor.NEEDED]
    answers = {"torch_checks": usable, "torch_behaviour": json.loads(behaviour)}
    monkeypatch.setattr(doctor, "ask_child", lambda verb, timeout_s: answers[verb])
    refused = CliRunner().invoke(main, ["doctor", "--deep", "-v"])
    assert refused.exit_code == 1
    (failed,) = [line for line in refused.stdout.splitlines() if line.startswith("FAILED")]
    assert "tracing" in failed and "no default backend" in " ".join(refused.stdout.split())
    assert refused.stdout.splitlines()[-1].startswith("FAIL: ") and "tracing" in refused.stdout.splitlines()[-1]
