"""The commands `gate`, `baseline` and `export`: arguments to calls, results to text and exit codes."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.commands.self_test import self_test
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    from distbench.gate.verdict import Gated

FORMS = ("table", "markdown", "json", "junit", "github")
EXPORTS = ("pytest-benchmark", "customSmallerIsBetter", "bmf", "otava", "run")
SEPARATOR = "vs"


@click.command()
@click.argument("paths", nargs=-1, metavar="BASELINE... [vs] CANDIDATE...")
@click.option("--tolerance", multiple=True, metavar="[METRIC=]X", help="Slowdown still fine: 5%, 0.05, min=3%. [5%]")
@click.option("--floor-us", type=click.FloatRange(0), default=0.0, metavar="US", help="Ignore smaller differences.")
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.05,
    metavar="P",
    help="Chance of any false alarm in a comparison, all cases together. [0.05]",
)
@click.option("--min-launches", type=click.IntRange(2), default=5, show_default=True, help="No verdict below so many.")
@click.option("--dedicated", is_flag=True, help="The machine is yours alone: a baseline of another day may fail.")
@click.option("--allow-different", multiple=True, metavar="FIELD", help="Compare although this field differs.")
@click.option("--strict", is_flag=True, help="Exit with 3 when a case is inconclusive.")
@click.option("--format", "form", type=click.Choice(FORMS), default="table", help="What to print.")
@click.option("--write", multiple=True, metavar="FORMAT=FILE", help="Also write this format to a file.")
@click.option("--github", is_flag=True, help="Also print annotations, and append Markdown to the step summary.")
@click.option("--signature", is_flag=True, help="Compare signatures instead, exactly: see distbench signature.")
@click.option("--update", is_flag=True, help="With --signature: make the baseline what the candidate is.")
@click.option("--self-test", "try_itself", is_flag=True, help="Try the gate on unchanged code here; see below.")
@click.option("--launches", type=click.IntRange(2), default=24, show_default=True, help="With --self-test: so many.")
@click.pass_context
def gate(
    ctx: click.Context,
    paths: tuple[str, ...],
    tolerance: tuple[str, ...],
    floor_us: float,
    alpha: float,
    min_launches: int,
    dedicated: bool,
    allow_different: tuple[str, ...],
    strict: bool,
    form: str,
    write: tuple[str, ...],
    github: bool,
    signature: bool,
    update: bool,
    try_itself: bool,
    launches: int,
) -> None:
    """Say whether CANDIDATE runs slower than BASELINE. One run file is one launch; give several a side.

    Each side is folders, run files, quoted patterns, or stored baselines. Two paths are the two sides; more are told
    apart by the word vs between them. Launches that took turns are compared in pairs; launches of two occasions can
    only warn, unless the machine is --dedicated.

    With --self-test it is launched code that does not change: PATHS is a folder of run files of one revision, or, after
    --, what distbench run is given (default: collectives --quick). It prints how often the gate would have called
    unchanged code slower, and how often it would have found slowdowns that are put into the samples.

    Exit code: 0 pass (what could not be told is warned about), 1 regression, 2 you can fix it, 3 inconclusive under
    --strict, 4 not comparable, missing, failed, or nothing measured.

    \b
    Examples:
      distbench gate base/ new/
      distbench gate base/*.jsonl vs new/*.jsonl --tolerance 10% --tolerance min=5%
      distbench gate results/baselines/ci-runner new/ --github --write junit=gate.xml
      distbench gate --signature signatures/llama_2d.signature new.signature
      distbench gate --self-test --launches 30 -- llama_2d --quick
    """
    if not paths and not try_itself:
        raise UserError("gate compares two sides: distbench gate BASELINE... vs CANDIDATE...")
    if signature or update:
        _gate_signatures(ctx, paths, signature, update)
        return
    from distbench.gate.comparable import check_allowed
    from distbench.gate.gate import gate as judge
    from distbench.gate.launches import read_side
    from distbench.gate.options import Options, tolerances_of

    options = Options(
        tolerances=tolerances_of(tolerance),
        floor_s=floor_us * 1e-6,
        alpha=alpha,
        min_launches=min_launches,
        dedicated=dedicated,
        allowed=check_allowed(allow_different),
    )
    if try_itself:
        self_test(paths, launches, options)
        return
    targets = _targets(write)
    warnings: list[str] = []
    left, right = sides_of(paths)
    baseline, candidate = read_side(left, "baseline", warnings), read_side(right, "candidate", warnings)
    gated = judge(baseline, candidate, options, warnings)
    click.echo(_rendered(gated, form, strict))
    for one, path in targets:
        _write(path, _rendered(gated, one, strict) + "\n", "w")
    if github:
        if form != "github":
            click.echo(_rendered(gated, "github", strict))
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            _write(Path(summary), _rendered(gated, "markdown", strict) + "\n", "a")
    ctx.exit(gated.exit_code(strict))


def _gate_signatures(ctx: click.Context, paths: tuple[str, ...], signature: bool, update: bool) -> None:
    from distbench.signature.gate import compare
    from distbench.signature.gate import update as make_baseline

    if not signature:
        raise UserError("--update is for --signature; a timing baseline is stored with distbench baseline save")
    if len(paths) != 2:
        raise UserError(f"--signature compares two files or two folders, {len(paths)} are given: --signature BASE NEW")
    base, new = map(Path, paths)
    if update:
        written = make_baseline(base, new)
        click.echo("\n".join(f"baseline: {path}" for path in written) or "nothing to update")
        return
    found = compare(base, new)
    click.echo(found.text())
    if found.changed:
        click.echo(f"If that is meant: distbench gate --signature {base} {new} --update", err=True)
    ctx.exit(found.exit_code)


def sides_of(paths: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The baseline's and the candidate's paths.

    Raises:
        UserError: the two sides cannot be told apart, or a pattern matches nothing.
    """
    if SEPARATOR in paths:
        place = paths.index(SEPARATOR)
        left, right = paths[:place], paths[place + 1 :]
    else:
        left, right = paths[:1], paths[1:]
        if len(paths) > 2:
            raise UserError(
                f"{len(paths)} paths are given, and which are the candidate's is not clear; write the word vs between "
                "the two sides: distbench gate BASELINE... vs CANDIDATE..."
            )
    if not left or not right or SEPARATOR in right:
        raise UserError("gate compares two sides: distbench gate BASELINE... vs CANDIDATE...")
    return _expanded(left), _expanded(right)


def _expanded(paths: Sequence[str]) -> list[Path]:
    """Patterns that a shell has not expanded are expanded here; what exists is taken by its name."""
    found: list[Path] = []
    for text in paths:
        if Path(text).exists() or not glob.has_magic(text):
            found.append(Path(text))
            continue
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matches:
            raise UserError(f"pattern {text!r} matches no file; give run files or a folder of them")
        found += [Path(match) for match in matches]
    return found


def _rendered(gated: "Gated", form: str, strict: bool) -> str:
    from distbench.gate import ci, page

    if form == "markdown":
        return page.markdown(gated, strict)
    if form == "json":
        return ci.json_text(gated, strict)
    if form == "junit":
        return ci.junit_text(gated)
    return ci.annotations(gated, strict) if form == "github" else page.text(gated, strict)


def _targets(texts: Sequence[str]) -> list[tuple[str, Path]]:
    targets = []
    for text in texts:
        form, equals, path = text.partition("=")
        if not equals or form not in FORMS or not path:
            raise UserError(f"--write {text!r} is not FORMAT=FILE with a format of {', '.join(FORMS)}")
        targets.append((form, Path(path)))
    return targets


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another file") from error


@click.group()
def baseline() -> None:
    """Save, list and show stored baselines: one value a launch, small enough for git.

    \b
    Example:
      distbench baseline save runs/
    """


@baseline.command("save")
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder.")
def save(paths: tuple[str, ...], out: Path) -> None:
    """Store run files as baselines under OUT/baselines/MACHINE/, replacing those of the same scenario and mesh.

    \b
    Example:
      distbench baseline save runs/ && git add results/baselines
    """
    from distbench.gate.baseline import save_baselines
    from distbench.gate.launches import read_side

    warnings: list[str] = []
    launches = read_side(_expanded(paths), "baseline", warnings)
    for path in save_baselines(launches, out):
        click.echo(f"baseline: {path}")
    for warning in warnings:
        click.echo(f"distbench: {warning}", err=True)


@baseline.command("list")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder.")
def list_baselines(out: Path) -> None:
    """List stored baselines.

    \b
    Example:
      distbench baseline list
    """
    from distbench.gate.baseline import FOLDER, baseline_files, describe
    from distbench.report.layout import Table, text_of

    rows = describe(baseline_files(out), out / FOLDER)
    if not rows:
        click.echo(f"no baseline is under {out / FOLDER}; store one with distbench baseline save")
        return
    columns = ("<file", "<scenario", "<mesh", "launches", "cases", "<commit", "<saved at")
    click.echo(text_of([Table(f"baselines under {out / FOLDER}:", columns, rows)]))


@baseline.command()
@click.argument("file", type=click.Path(path_type=Path))
def show(file: Path) -> None:
    """Show one stored baseline: where it comes from, and each case's spread between launches.

    \b
    Example:
      distbench baseline show results/baselines/ci-runner/llama_2d-dp_shard-2-tp-2-cpu.json
    """
    from distbench.gate.show import baseline_page

    click.echo(baseline_page(file))


@click.command()
@click.argument("form", metavar="FORMAT", type=click.Choice(EXPORTS))
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "output", type=click.Path(path_type=Path), metavar="FILE", help="Default: standard output.")
def export(form: str, paths: tuple[str, ...], output: Path | None) -> None:
    """Write runs in another tool's FORMAT, one value a launch, never raw samples.

    FORMAT is pytest-benchmark, customSmallerIsBetter (github-action-benchmark), bmf (Bencher), otava (CSV), or run:
    distbench's own run file, of an nccl-tests JSON file (-J), for distbench report.

    \b
    Examples:
      distbench export pytest-benchmark runs/ -o 0001_new.json
      distbench export run all_reduce.json -o results/all_reduce.jsonl
    """
    from distbench.gate.exchange.formats import exported

    text = exported(form, _expanded(paths))
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text, "w")
