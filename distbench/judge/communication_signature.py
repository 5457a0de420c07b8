"""Communication signatures: a scenario's communication as text for git, the comparison of signatures, and the exact
gate.

A path is a kind of communication in a step: phase, source, kind, mesh dim, group size, dtype, payload, owner and
redistribution. All layers of a stack have one common owner (`layers.*.attention`). A path's count is the number of its
communications in the step.
"""

import contextlib
import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from distbench.processes import ask_child
from distbench.records.run_file import Record, read_run
from distbench.show.blocks import code_span, markdown_text
from distbench.show.ci_formats import TOOL, CiOutcome, annotation, annotations, badge, junit_xml
from distbench.show.terminal import width_here, wrap
from distbench.show.units import size_text
from distbench.spec import Job
from distbench.spec.errors import UserError
from distbench.spec.file_io import read_text, shown, write_whole, writing
from distbench.spec.mesh import format_mesh, parse_mesh
from distbench.spec.plan import folded
from distbench.spec.printable_text import capped_lines, count_text, printable
from distbench.spec.versions import release

VERSION, TIMEOUT_S = 1, 600.0
FIRST_LINE = "distbench signature, version"
PHASES = ("forward", "backward", "optimizer", "other", "save", "load", "call")
PEAK = "predicted peak memory"
HEAD, HEAD_LINES = ("scenario", "mesh", "torch"), 4
_NUMBER = r"[0-9]{1,18}"  # a number of bytes has at most this many digits
PEAK_LINE = re.compile(rf"{PEAK} ({_NUMBER}) B")
ROOT, UNKNOWN_OWNER = "(root)", "(unknown)"
LINE = re.compile(
    rf"(?P<count>{_NUMBER}) x (?P<phase>\S+) (?P<source>\S+) (?P<kind>\S+) over (?P<mesh_dim>\S+) "
    rf"\((?P<group_size>{_NUMBER})\), (?P<dtype>\S+), (?P<payload_bytes>{_NUMBER}) B: (?P<owner>\S[^,]*)"
    r"(?:, (?P<explicit>explicit|implicit) (?P<redistribution>\S+))?"
)


@dataclass(frozen=True)
class CommunicationPath:
    """One path: the fields of `observe.module_attribution.Communication`; all layers of a stack share one owner."""

    phase: str
    source: str
    kind: str
    mesh_dim: str
    group_size: int
    dtype: str
    payload_bytes: int
    owner: str
    redistribution: str = ""
    explicit: bool | None = None

    def text(self) -> str:
        """The path's line in a signature file, without the count."""
        text = f"{self.phase} {self.source} {self.kind} over {self.mesh_dim} ({self.group_size}), {self.dtype}"
        return f"{text}, {self.payload_bytes} B: {self.owner}{self.cause}"

    @property
    def cause(self) -> str:
        """The redistribution that contains the path, as in `, implicit S(1)->R`, or ""."""
        return f", {'explicit' if self.explicit else 'implicit'} {self.redistribution}" if self.redistribution else ""


@dataclass(frozen=True)
class Signature:
    """The communication of one scenario on one mesh, on rank 0.

    Args:
        mesh: mesh dim names to ranks, outermost first.
        torch: torch's version, which is shown but not compared.
        cases: case id to the count of each path.
        peaks: case id to the predicted peak of tensor memory, bytes; only for cases with a model.
        has_peaks: whether peaks were predicted; measured peaks (of a run file) are not comparable with predicted peaks.
    """

    scenario: str
    mesh: Mapping[str, int]
    torch: str
    cases: Mapping[str, Mapping[CommunicationPath, int]]
    peaks: Mapping[str, int] = field(default_factory=dict)
    has_peaks: bool = True

    def to_text(self) -> str:
        """The file's content, with cases and paths in a fixed order."""
        head = [f"{FIRST_LINE} {VERSION}", f"scenario {self.scenario}", f"mesh {format_mesh(self.mesh)}"]
        lines = [*head, f"torch {self.torch}"]
        for case in sorted(self.cases):
            counts = self.cases[case]
            lines += ["", f"[{case}]"]
            lines += [f"{PEAK} {self.peaks[case]} B"] if case in self.peaks else []
            texts = sorted(((*PHASES, path.phase).index(path.phase), path.text(), counts[path]) for path in counts)
            lines += [f"{count} x {text}" for _, text, count in texts] or ["nothing"]
        return "\n".join(lines) + "\n"


def counted(communications: list[dict[str, Any]], fold_layers: bool = True) -> Counter[CommunicationPath]:
    """Count records of `observe.module_attribution.Communication` by path."""
    names = [path_field.name for path_field in fields(CommunicationPath)]
    counts: Counter[CommunicationPath] = Counter()
    for record in communications:
        name = folded(record["owner"]) if fold_layers else record["owner"]
        owner = name or ROOT if record["owner_known"] else UNKNOWN_OWNER
        counts[CommunicationPath(**{name: record[name] for name in names} | {"owner": owner})] += 1
    return counts


def parse(text: str, where: str) -> Signature:
    """Read the text of `Signature.to_text`. Raise UserError, with a message that begins with `where`, for other text or
    a newer version."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[0].startswith(FIRST_LINE):
        raise UserError(f"{where} is not a signature; write a signature with distbench signature SCENARIO -o {where}")
    version = lines[0].removeprefix(FIRST_LINE).strip()
    if version != str(VERSION):
        wrong = f"{where} has signature version {shown(version)}; this distbench reads version {VERSION}"
        raise UserError(f"{wrong}; update distbench, or write the file again")
    head = {line.partition(" ")[0]: line.partition(" ")[2] for line in lines[1:HEAD_LINES] if line.isprintable()}
    if lacking := [name for name in HEAD if name not in head]:
        raise UserError(f"{where} has no line {lacking[0]!r}; write the file again")
    try:
        mesh = parse_mesh(head["mesh"])
    except UserError as error:
        raise UserError(f"{where}: line 'mesh' is not valid: {error}; write the file again") from error
    cases: dict[str, dict[CommunicationPath, int]] = {}
    peaks: dict[str, int] = {}
    for number, line in enumerate(lines[HEAD_LINES:], start=HEAD_LINES + 1):
        if line not in ("", "nothing") and not _is_read(line, cases, peaks):
            wrong = f"{where}, line {number} is not a path, or is a duplicate within its case: {shown(line)}"
            raise UserError(f"{wrong}; write the file again")
    return Signature(head["scenario"], mesh, head["torch"], cases, peaks)


def _is_read(line: str, cases: dict[str, dict[CommunicationPath, int]], peaks: dict[str, int]) -> bool:
    """Begin a case or add the line to the last case; return False for an invalid or repeated line."""
    if line.startswith("[") and line.endswith("]") and line.isprintable() and line[1:-1] not in cases:
        cases[line[1:-1]] = {}
        return True
    if not cases or not line.isprintable():
        return False
    case = next(reversed(cases))
    if (peak := PEAK_LINE.fullmatch(line)) and case not in peaks:
        peaks[case] = int(peak[1])
        return True
    if (match := LINE.fullmatch(line)) is None:
        return False
    parts: dict[str, Any] = match.groupdict()
    parts |= {name: int(parts[name]) for name in ("count", "group_size", "payload_bytes")}
    parts["explicit"] = parts["explicit"] and parts["explicit"] == "explicit"
    count, path = parts.pop("count"), CommunicationPath(**parts | {"redistribution": parts["redistribution"] or ""})
    if path in cases[case] or not count:
        return False
    cases[case][path] = count
    return True


def load(file: Path) -> Signature:
    """Return the signature of a signature file or run file (*.jsonl). Raise UserError for other files, or without a
    trace."""
    return of_run_file(file) if file.suffix == ".jsonl" else parse(read_text(file, "signature"), f"signature {file}")


def of_run_file(file: Path) -> Signature:
    """The signature of a run's traced or simulated steps: in each trace, the first step of the lowest rank."""
    run = read_run(file)
    traces = {str(trace["case_id"]): _collectives(trace) for trace in run.traces if not trace.get("error")}
    if not traces:
        how = "trace a step with distbench run SCENARIO --trace-paths, or simulate the step"
        raise UserError(f"run file {file} has no trace of a step; {how}")
    try:
        cases = {case: counted(rows) for case, rows in traces.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"run file {file}: a trace lacks {error}; trace the step again with this distbench") from error
    return Signature(
        run.scenario, run.about.mesh or {}, run.about.environment.torch or "unknown", cases, has_peaks=False
    )


def _collectives(trace: Record) -> list[Record]:
    rows = [dict(zip(trace["columns"], row, strict=True)) for row in trace["rows"]]
    first = min(((row.get("rank", 0), row.get("step", 0)) for row in rows), default=(0, 0))
    first_rows = [row for row in rows if (row.get("rank", 0), row.get("step", 0)) == first]
    # A signature contains no null.
    return [{**row, "owner": row["owner"] or "", "redistribution": row["redistribution"] or ""} for row in first_rows]


def incomparable(base: Signature, new: Signature) -> str | None:
    """Return the reason why two signatures are not comparable; None if they are comparable."""
    if base.scenario != new.scenario:
        return f"scenario {base.scenario} in the baseline, {new.scenario} in the candidate"
    if dict(base.mesh) != dict(new.mesh):
        return f"mesh {format_mesh(base.mesh)} in the baseline, {format_mesh(new.mesh)} in the candidate"
    return None


def differences(base: Signature, new: Signature) -> list[str]:
    """Return one sentence per path with a different count, and one sentence per case that is on one side only.

    A sentence contains module, collective, mesh dim and bytes. Paths that differ only in payload share one sentence.
    """
    sentences = []
    for case in sorted({*base.cases, *new.cases}):
        if case not in new.cases:
            sentences.append(f"{case}: missing in the candidate")
        elif case not in base.cases:
            sentences.append(f"{case}: not in the baseline")
        else:
            texts = _path_differences(base.cases[case], new.cases[case])
            before, after = base.peaks.get(case), new.peaks.get(case)
            # An older baseline may lack the predicted peak of this case.
            if before is not None and before != after and base.has_peaks and new.has_peaks:
                new_peak = "none" if after is None else f"{size_text(after)} ({after} B)"
                texts.append(f"{PEAK} {size_text(before)} ({before} B) became {new_peak}")
            sentences += [f"{case}: {text}" for text in texts]
    return sentences


def _path_differences(before: Mapping[CommunicationPath, int], after: Mapping[CommunicationPath, int]) -> list[str]:
    change = {path: after.get(path, 0) - before.get(path, 0) for path in {**before, **after}}
    added = {path: count for path, count in change.items() if count > 0}
    removed = {path: count for path, count in change.items() if count < 0}
    words = {path: f"{path.kind} over {path.mesh_dim} ({path.source})" for path in change}
    sizes = {path: f"{size_text(path.payload_bytes)} {path.dtype}" for path in change}
    texts = []
    for path, count in list(removed.items()):
        for new_path, new_count in added.items():
            resized = replace(path, payload_bytes=new_path.payload_bytes, dtype=new_path.dtype)
            if resized == new_path and new_count == -count:
                became = f"{sizes[path]} became {sizes[new_path]}"
                texts.append(f"{path.owner}, {path.phase}: {-count} {words[path]} of {became}")
                del removed[path], added[new_path]
                break
    texts += [
        f"{path.owner}, {path.phase}: {count:+} {words[path]}, {sizes[path]}{path.cause}"
        for path, count in {**added, **removed}.items()
    ]
    return sorted(texts)


# The exact gate compares signatures without a tolerance, independent of the machine.
#
# If a plan's communication depends on the torch version, NAME.signature is valid for the torch that wrote it and for
# newer versions, up to the version X.Y of a NAME.torch-X.Y.signature in the same folder.

SUFFIX = ".signature"
IS_VERSION = re.compile(r"\d+\.\d+")
OF_TORCH = re.compile(rf"(?P<name>.+)\.torch-(?P<release>\d+\.\d+){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class SignatureComparison:
    """The outcome of the exact gate.

    Args:
        changed: file name to its differences, one sentence per path.
        uncompared: sentences on files that are not comparable, or that are on one side only.
        same: names of the files without a difference.
        num_paths: number of paths in all compared files; 0 if nothing was compared.
        shown: differences that do not affect the outcome.
    """

    changed: dict[str, list[str]] = field(default_factory=dict)
    uncompared: list[str] = field(default_factory=list)
    same: tuple[str, ...] = ()
    num_paths: int = 0
    shown: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code: 0 no difference, 1 a difference, 4 a file that is missing or not comparable, or no path
        compared."""
        if self.changed:
            return 1
        return 4 if self.uncompared or not self.num_paths else 0

    @property
    def headline(self) -> str:
        """The verdict, and the number of equal signatures."""
        word = {0: "PASS", 1: "FAIL", 4: "NO VERDICT"}[self.exit_code]
        summary = f"{len(self.same)} of {len(self.same) + len(self.changed)} signatures match the baseline"
        return f"{word}: {summary}" + ("" if self.num_paths else "; nothing communicates, so nothing was compared")


def compare(base: Path, new: Path) -> SignatureComparison:
    """Compare two signature files or run files, or two folders of `*.signature` files by name.

    Raises:
        UserError: the inputs are not two such files or two such folders.
    """
    if base.is_dir() != new.is_dir():
        raise UserError(f"{base} and {new}: give two signature files, or two folders of *{SUFFIX} files")
    if not base.is_dir():
        return compare_with_stored(base, load(new), new.name)
    # File names without their torch version.
    before_names, after_names = (
        sorted({OF_TORCH.sub(rf"\g<name>{SUFFIX}", path.name) for path in side.glob(f"*{SUFFIX}")})
        for side in (base, new)
    )
    if not before_names and not after_names:
        raise UserError(
            f"{base} and {new} contain no *{SUFFIX} file; write signatures with signature write --output-dir"
        )
    alone = [f"{name}: missing in {new}" for name in before_names if name not in after_names]
    alone += [f"{name}: not in {base}; signature update adds it" for name in after_names if name not in before_names]
    afters = {name: load(new / name) for name in before_names if name in after_names}
    pairs = {name: (load(stored_for(base / name, after.torch)), after) for name, after in afters.items()}
    return _compared(pairs, alone)


def compare_with_stored(base: Path, new: Signature, name: str = "") -> SignatureComparison:
    """Compare `new` with the stored file for its torch version. Raise UserError if that file is not a signature."""
    return _compared({name or base.name: (load(stored_for(base, new.torch)), new)}, [])


def stored_for(base: Path, torch: str) -> Path:
    """Return the stored file for a torch version. Candidates are `base` and each NAME.torch-X.Y.signature in its
    folder. The newest candidate that is not newer than `torch` is returned, or `base` if all are newer."""
    paths = base.parent.glob(f"{glob.escape(base.stem)}.torch-*{SUFFIX}")
    versions = {release(match["release"]): path for path in paths if (match := OF_TORCH.fullmatch(path.name))}
    if not versions or not IS_VERSION.match(torch):
        return base
    with contextlib.suppress(UserError):
        if IS_VERSION.match(own_torch := load(base).torch):
            versions[release(own_torch)] = base
    fitting = [version for version in versions if version <= release(torch)]
    return versions[max(fitting)] if fitting else base


def _of_other_torch(before: Signature, after: Signature) -> bool:
    """Whether the torch versions of two signatures differ by more than the patch number."""
    return before.torch.split(".")[:2] != after.torch.split(".")[:2]


def _compared(pairs: dict[str, tuple[Signature, Signature]], alone: list[str]) -> SignatureComparison:
    changed, uncompared, unchanged, num_paths = {}, list(alone), [], 0
    for name, (before, after) in pairs.items():
        if reason := incomparable(before, after):
            uncompared.append(f"{name}: not comparable: {reason}")
            continue
        num_paths += sum(map(len, (*before.cases.values(), *after.cases.values())))
        sentences = differences(before, after)
        if not sentences:
            unchanged.append(name)
        elif _of_other_torch(before, after):
            more = f" (1 of {count_text(len(sentences), 'difference')})" if len(sentences) > 1 else ""
            uncompared.append(
                f"{name}: communication under torch {after.torch} differs from the baseline's under torch "
                f"{before.torch}: {sentences[0]}{more}; compare under one torch, or run signature update"
            )
        else:
            changed[name] = sentences
    torches = {(before.torch, after.torch): None for before, after in pairs.values() if before.torch != after.torch}
    torch_lines = tuple(f"torch: {before} in the baseline, {after} in the candidate" for before, after in torches)
    return SignatureComparison(changed, uncompared, tuple(unchanged), num_paths, torch_lines)


def update(base: Path, new: Path) -> list[Path]:
    """Replace the baseline by `new`; return the written files. Raise UserError for a file that is not a signature or
    not writable."""
    targets = [(base, new)]
    if new.is_dir():
        targets = [(base / path.name, path) for path in sorted(new.glob(f"*{SUFFIX}"))]
    written_files = []
    for stored, source in targets:
        after = load(source)
        target, text = stored_for(stored, after.torch), after.to_text()
        with contextlib.suppress(UserError):  # replace a file that is not a signature
            before = load(target)
            if _of_other_torch(before, after):
                if not differences(before, after):
                    continue
                target = stored.with_name(f"{stored.stem}.torch-{'.'.join(map(str, release(after.torch)))}{SUFFIX}")
        with writing(str(target)):
            if target.exists() and not target.is_file():
                raise UserError(f"{target} cannot be written, because the path is not a file; give another file")
            # Bytes, because the old file may not be text.
            if not target.exists() or target.read_bytes() != text.encode():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, text)
                written_files.append(target)
    return written_files


MAX_LINES = 2000  # in Markdown: a GitHub step summary holds 1 MiB
MORE_LINES = f"\n... {{}} more lines: {TOOL} signature check --json"


def answer(comparison: SignatureComparison) -> str:
    """The finding, with its severity first."""
    num_same, num_changed = len(comparison.same), len(comparison.changed)
    count = count_text(num_same + num_changed, "signature")
    if comparison.changed:
        num_differences = sum(map(len, comparison.changed.values()))
        return f"FAIL: {num_changed} of {count} changed ({count_text(num_differences, 'difference')})"
    if comparison.uncompared:
        return f"UNKNOWN: {len(comparison.uncompared)} not compared, {num_same} unchanged"
    if not comparison.num_paths:
        return "UNKNOWN: neither side communicates, so nothing was compared"
    return f"PASS: {count} unchanged"


def text(comparison: SignatureComparison) -> str:
    """The comparison as text for a terminal."""
    lines = []
    for name, sentences in comparison.changed.items():
        count = count_text(len(sentences), "difference")
        lines += [f"{name}: {count}", *(f"  {sentence}" for sentence in sentences)]
    lines += [*comparison.uncompared, *comparison.shown, answer(comparison)]
    return printable("\n".join(part for line in lines for part in wrap(line, width_here(), "    ")))


def markdown(comparison: SignatureComparison) -> str:
    """The comparison as Markdown for a step summary: a heading with the verdict, then a list per file."""
    changed: list[str] = []
    for name, sentences in comparison.changed.items():
        changed += ["", f"**{markdown_text(name)}**", "", *(f"- {code_span(sentence)}" for sentence in sentences)]
    lines = [f"# exact gate: {answer(comparison)}", *capped_lines(changed, MAX_LINES, MORE_LINES)]
    notes = [f"- {markdown_text(sentence)}" for sentence in (*comparison.uncompared, *comparison.shown)]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def json_text(comparison: SignatureComparison) -> str:
    """The comparison as JSON."""
    return json.dumps(
        {"exit_code": comparison.exit_code, "headline": comparison.headline, **asdict(comparison)}, indent=1
    )


def junit_text(comparison: SignatureComparison) -> str:
    """JUnit XML: one test case per file, with a failure for a changed file and an error for a file that is not
    comparable."""
    outcomes: list[tuple[str, str, str | None]]
    outcomes = [(name, "\n".join(texts), "failure") for name, texts in comparison.changed.items()]
    outcomes += [(sentence.partition(":")[0], sentence, "error") for sentence in comparison.uncompared]
    outcomes += [(name, "as in the baseline", None) for name in comparison.same]
    if not comparison.num_paths:
        outcomes.append(("something was compared", comparison.headline, "error"))
    return junit_xml([CiOutcome("signatures", *outcome) for outcome in outcomes])


def github(comparison: SignatureComparison) -> str:
    """GitHub's annotations: an error for each difference and each file that is not comparable."""
    errors = [(name, sentence) for name, sentences in comparison.changed.items() for sentence in sentences]
    errors += [("not compared", sentence) for sentence in comparison.uncompared]
    lines = annotations({"error": errors})
    return "\n".join(lines if comparison.num_paths else [annotation("error", TOOL, comparison.headline), *lines])


def badge_text(comparison: SignatureComparison) -> str:
    """The JSON of a badge with the answer."""
    return badge("distbench signature", answer(comparison))


# Names of `--format`; judge/gate_text.py has the names of the timing gate.
FORMS: dict[str, Callable[[SignatureComparison], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": github, "badge": badge_text},
}


def signatures_of(jobs: Sequence[Job]) -> list[tuple[Signature, dict[str, str]] | str]:
    """Return per job its signature and the errors of cases that cannot run (by case id), or the reason why it has no
    signature.

    A child process runs each case once on a fake process group.

    Raises:
        UserError: the process failed or did not end.
    """
    names = ", ".join(job.scenario for job in jobs)
    answers = ask_child(
        "signatures",
        given=[job.to_record() for job in jobs],
        timeout_s=TIMEOUT_S,
        failure=f"no signature of {names}: {{why}}; check that distbench run works, or give --quick",
    )
    signatures: list[tuple[Signature, dict[str, str]] | str] = []
    for job, answer in zip(jobs, answers, strict=True):
        if "user_error" in answer:
            signatures.append(answer["user_error"])
            continue
        records = answer["cases"].items()
        cases = {case: counted(record["paths"]) for case, record in records}
        peaks = {case: record["peak_bytes"] for case, record in records if record["peak_bytes"] is not None}
        signatures.append((Signature(job.scenario, job.mesh, answer["torch"], cases, peaks), answer["left_out"]))
    return signatures
