"""The command `distbench doctor`."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from distbench.cli.main import defaults_for, main
from distbench.cli.options import format_option, say_lines, verbose_option, width_option
from distbench.processes import ask_child
from distbench.records.machine import accelerator_here, checks_of, host_facts, output_of
from distbench.show.terminal import shows_notes
from distbench.spec.devices import SWITCHED_OFF, built_for, known_device
from distbench.spec.errors import UserError
from distbench.spec.mesh import RANKS_PER_CPU
from distbench.spec.printable_text import count_text
from distbench.spec.versions import INSTALL, SUPPORTED, installed_torch

CHECKS_TIMEOUT_S, BEHAVIOUR_TIMEOUT_S = 300.0, 600.0
# Checks without which nothing runs.
NEEDED = {"torch version", "torch.distributed", "gloo"}


@click.command()
@click.option("--deep", is_flag=True, help="Also try a traced step, simulated steps and each planner, in about 10 s.")
@format_option("table", "json")
@verbose_option
@width_option
def doctor(deep: bool, form: str) -> None:
    """Check this machine: devices, backends, torch, and each private torch name that distbench uses.

    The last line is the verdict. -v also lists every check, and the defaults of this folder's pyproject.toml.

    With --deep, also try the features that depend on torch's behaviour: a traced step, simulated steps, each planner.
    The exit code is 1 if a feature fails with this torch.

    \b
    Examples:
      distbench doctor
      distbench doctor --deep -v
    """
    defaults = defaults_for(main)
    values = {"file": str(defaults.file), "values": defaults.given} if defaults.file else None
    findings = {**examine(deep), "defaults": values}
    if form == "json":
        click.echo(json.dumps(findings, indent=1))
    else:
        if shows_notes():
            of_project = [f"\ndefaults of {defaults.file}:", *(f"  {line}" for line in defaults.lines())]
            say_lines([*check_lines(findings["checks"]), *(of_project if defaults.file else []), ""], " " * 8)
        say_lines(summary_lines(findings))
    sys.exit(0 if findings["usable"] and not _broken(findings) else 1)


def examine(deep: bool = False) -> dict[str, Any]:
    """Return facts of the host and of torch, and a list of checks.

    Each check has `name`, `ok`, `found` and `advice`. A check of a private torch name also has the `feature` that uses
    the name.

    Args:
        deep: also try features that depend on torch's behaviour: a traced step, simulated steps, each planner.
    """
    device, num_seen = accelerator_here()
    try:
        checks = ask_child("torch_checks", timeout_s=CHECKS_TIMEOUT_S)
    except UserError as error:
        advice = "" if INSTALL in str(error) else INSTALL
        checks = [{"name": "torch", "ok": False, "found": str(error), "advice": advice}]
    else:
        outcomes = [check["ok"] for check in checks if check.get("device") == device]
        ok = not num_seen or (bool(outcomes) and all(outcomes))  # torch may have NCCL and no usable device
        advice = "" if ok else f"install a torch built for {built_for(device)}"
        checks += [
            _path_check(),
            {"name": "GPUs of this host", "ok": ok, "found": str(num_seen), "advice": advice},
            *checks_of(output_of, os.environ, SWITCHED_OFF),
        ]
        checks += _behaviour_checks() if deep else []
    usable = {check["name"] for check in checks if check["ok"] or check.get("mark") == "warning"} >= NEEDED
    return {"host": host_facts(), "checks": checks, "usable": usable, "device": device, "num_devices": num_seen}


def _path_check() -> dict[str, Any]:
    check = {"name": "torch on Python's path", "advice": ""}
    try:
        return {**check, "ok": True, "found": installed_torch()}
    except UserError as error:
        return {**check, "ok": False, "found": str(error)}


def _behaviour_checks() -> list[dict[str, Any]]:
    try:
        rows = ask_child("torch_behaviour", timeout_s=BEHAVIOUR_TIMEOUT_S)
    except UserError as error:
        rows = [{"feature": "every feature", "failed": str(error)}]
    return [
        {
            "name": row["feature"],
            "ok": row["failed"] is None,
            "found": "works" if row["failed"] is None else f"does not work with this torch: {row['failed']}",
            "advice": f"use {SUPPORTED}, or do not use this feature",
            "mark": "FAILED",
            "deep": True,
        }
        for row in rows
    ]


def _broken(findings: dict[str, Any]) -> list[str]:
    """The features that --deep has tried and that do not work."""
    return [check["name"] for check in findings.get("checks", ()) if check.get("deep") and not check["ok"]]


def check_lines(checks: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line per check, with advice below each failed check."""
    lines = []
    width = max(len(check["name"]) for check in checks)
    for check in checks:
        mark = "ok" if check["ok"] else check.get("mark", "MISSING")
        lines.append(f"{mark:<8}{check['name']:<{width}}  {check['found']}")
        if not check["ok"] and check["advice"]:
            lines.append(f"{'':<8}-> {check['advice']}")
    return lines


def summary_lines(findings: dict[str, Any]) -> list[str]:
    """Return six lines: the machine, torch, devices, the default launch, missing parts, and the verdict.

    A warning adds a line.
    """
    from distbench.launch.nodes import launcher_here

    host, checks = findings["host"], findings["checks"]
    found = {check["name"]: check["found"] for check in checks if check["ok"] or check.get("mark") == "warning"}
    backends = [name for name in ("gloo", *(check["name"] for check in checks if "device" in check)) if name in found]
    private = [check["ok"] for check in checks if "feature" in check]
    memory = f"{(host['memory_bytes'] or 0) / 2**30:.1f} GiB"
    device, count = findings.get("device", "cpu"), findings.get("num_devices", 0)
    num_ranks = RANKS_PER_CPU * host["num_cpus"]
    warnings = [check for check in checks if not check["ok"] and check.get("mark") in ("warning", "LOOK")]
    failed = dict.fromkeys(
        check.get("feature", check["name"]) for check in checks if not check["ok"] and check not in warnings
    )
    return [
        f"machine: {host['machine']}: {host['cpu_model']}, {count_text(host['num_cpus'], 'CPU')}, {memory}",
        f"torch: {found.get('torch version', 'cannot be used')}, with {', '.join(backends) or 'no backend'}; "
        f"{sum(private)} of {len(private)} private names found",
        f"devices: {count_text(count, f'{device} device') if count else f'CPU only, for at most {num_ranks} ranks'}",
        f"launch: ranks on {device} with {known_device(device).backend}; --nodes N uses {launcher_here()}",
        f"missing: {', '.join(failed) or 'nothing'}{' (-v shows why)' * bool(failed)}",
        *(f"warning: {check['name']}: {check['found']}. {check['advice']}" for check in warnings),
        _verdict(findings),
    ]


def _verdict(findings: dict[str, Any]) -> str:
    if not findings["usable"]:
        missing = [check for check in findings["checks"] if not check["ok"] and check["name"] in (*NEEDED, "torch")]
        reasons = "; ".join(f"{check['name']}: {check['found']}. {check['advice']}" for check in missing)
        return f"FAIL: this machine cannot run distbench. {reasons}"
    if broken := _broken(findings):
        return f"FAIL: with this torch, these features do not work: {', '.join(broken)}. Use {SUPPORTED}"
    return "PASS: this machine can run distbench. Next: distbench run llama_2d --quick"
