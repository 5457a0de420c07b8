"""Communication signatures: what a scenario communicates as text for git, its differences, and the exact gate."""

import contextlib
import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from distbench.processes.ask_child import ask_child
from distbench.records.run_file import read_run
from distbench.records.run_file_fields import Record
from distbench.show.blocks import code_span, markdown_text
from distbench.show.ci_formats import TOOL, CiOutcome, annotation, annotations, junit_xml
from distbench.show.terminal import width_here, wrap
from distbench.show.units import size_text
from distbench.spec import Job
from distbench.spec.errors import UserError
from distbench.spec.file_io import read_text, shown, write_whole
from distbench.spec.mesh import format_mesh, parse_mesh
from distbench.spec.plan import folded
from distbench.spec.printable_text import capped_lines, count_text, printable
from distbench.spec.versions import release

# A communication signature: what a scenario communicates, as text that is stable, reviewable and kept in git.
#
# A path is one way that bytes take in a step: phase, source, kind, mesh dim, group size, dtype, payload, owner and
# redistribution. Layers of one stack are one owner (`layers.*.attention`), and how often a path is taken is its count.

VERSION = 1
FIRST_LINE = "distbench signature, version"
PHASES = ("forward", "backward", "optimizer", "save", "load", "call")
PEAK = "predicted peak memory"
HEAD, HEAD_LINES = ("scenario", "mesh", "torch"), 4
# No count of bytes has more digits, and Python reads no longer ones.
_NUMBER = r"[0-9]{1,18}"
PEAK_LINE = re.compile(rf"{PEAK} ({_NUMBER}) B")
ROOT, NOBODY = "(root)", "(unknown)"
LINE = re.compile(
    rf"(?P<count>{_NUMBER}) x (?P<phase>\S+) (?P<source>\S+) (?P<kind>\S+) over (?P<mesh_dim>\S+) "
    rf"\((?P<group_size>{_NUMBER})\), (?P<dtype>\S+), (?P<payload_bytes>{_NUMBER}) B: (?P<owner>\S[^,]*)"
    r"(?:, (?P<explicit>explicit|implicit) (?P<redistribution>\S+))?"
)


@dataclass(frozen=True)
class CommunicationPath:
    """One way that bytes take; the fields are those of `observe.module_attribution.Communication`, layers folded."""

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
        """As in a signature file, without the count."""
        text = f"{self.phase} {self.source} {self.kind} over {self.mesh_dim} ({self.group_size}), {self.dtype}"
        return f"{text}, {self.payload_bytes} B: {self.owner}{self.cause}"

    @property
    def cause(self) -> str:
        """The redistribution that it is part of, `, implicit S(1)->R`, or ""."""
        return f", {'explicit' if self.explicit else 'implicit'} {self.redistribution}" if self.redistribution else ""


@dataclass(frozen=True)
class Signature:
    """What one scenario communicates on one mesh, on rank 0.

    Args:
        mesh: mesh dim names to ranks, outermost first.
        torch: torch's version; shown, never compared.
        cases: case id to how often each path is taken.
        peaks: case id to the predicted peak of all tensors alive, bytes; cases without a model have none.
        has_peaks: whether peaks were predicted at all; a run file's are others.
    """

    scenario: str
    mesh: Mapping[str, int]
    torch: str
    cases: Mapping[str, Mapping[CommunicationPath, int]]
    peaks: Mapping[str, int] = field(default_factory=dict)
    has_peaks: bool = True

    def to_text(self) -> str:
        """The file's content: cases and paths in an order that depends on nothing else."""
        head = [f"{FIRST_LINE} {VERSION}", f"scenario {self.scenario}", f"mesh {format_mesh(self.mesh)}"]
        lines = [*head, f"torch {self.torch}"]
        for case in sorted(self.cases):
            counts = self.cases[case]
            lines += ["", f"[{case}]"]
            lines += [f"{PEAK} {self.peaks[case]} B"] if case in self.peaks else []
            lines += [f"{counts[path]} x {path.text()}" for path in sorted(counts, key=_order)] or ["nothing"]
        return "\n".join(lines) + "\n"


def _order(path: CommunicationPath) -> tuple[Any, ...]:
    return (PHASES.index(path.phase) if path.phase in PHASES else len(PHASES), path.text())


def counted(communications: list[dict[str, Any]]) -> Counter[CommunicationPath]:
    """Communications as `observe.module_attribution.Communication` has them, counted by path."""
    names = [path_field.name for path_field in fields(CommunicationPath)]
    counts: Counter[CommunicationPath] = Counter()
    for record in communications:
        owner = folded(record["owner"]) or ROOT if record["owner_known"] else NOBODY
        counts[CommunicationPath(**{name: record[name] for name in names} | {"owner": owner})] += 1
    return counts


def parse(text: str, where: str) -> Signature:
    """Read what `Signature.to_text` wrote; UserError, naming the file as `where`, for other text or a newer version."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[0].startswith(FIRST_LINE):
        raise UserError(f"{where} is no signature; write one with distbench signature SCENARIO -o {where}")
    version = lines[0].removeprefix(FIRST_LINE).strip()
    if version != str(VERSION):
        wrong = f"{where} is a signature of version {shown(version)}, not of {VERSION}, or newer than this distbench"
        raise UserError(f"{wrong}; update distbench, or write the file again")
    head = {line.partition(" ")[0]: line.partition(" ")[2] for line in lines[1:HEAD_LINES] if line.isprintable()}
    if lacking := [name for name in HEAD if name not in head]:
        raise UserError(f"{where} lacks its line {lacking[0]!r}; write the file again")
    try:
        mesh = parse_mesh(head["mesh"])
    except UserError as error:
        raise UserError(f"{where}: its line 'mesh' holds no mesh: {error}; write the file again") from error
    cases: dict[str, dict[CommunicationPath, int]] = {}
    peaks: dict[str, int] = {}
    for number, line in enumerate(lines[HEAD_LINES:], start=HEAD_LINES + 1):
        if line not in ("", "nothing") and not _is_read(line, cases, peaks):
            wrong = f"{where}, line {number} is no path, or one that its case has already: {shown(line)}"
            raise UserError(f"{wrong}; write the file again")
    return Signature(head["scenario"], mesh, head["torch"], cases, peaks)


def _is_read(line: str, cases: dict[str, dict[CommunicationPath, int]], peaks: dict[str, int]) -> bool:
    """Begin a case, or add a line to the last one; False for a line that does neither, or repeats one."""
    if line.startswith("[") and line.endswith("]") and line.isprintable() and line[1:-1] not in cases:
        cases[line[1:-1]] = {}
        return True
    if not cases or not line.isprintable():
        return False
    case = next(reversed(cases))
    if (peak := PEAK_LINE.fullmatch(line)) and case not in peaks:
        peaks[case] = int(peak[1])
        return True
    match = LINE.fullmatch(line)
    if match is None or _path(match) in cases[case] or not int(match["count"]):
        return False
    cases[case][_path(match)] = int(match["count"])
    return True


def _path(match: re.Match[str]) -> CommunicationPath:
    fields: dict[str, Any] = match.groupdict()
    del fields["count"]
    for name in ("group_size", "payload_bytes"):
        fields[name] = int(fields[name])
    explicit = fields["explicit"] and fields["explicit"] == "explicit"
    return CommunicationPath(**fields | {"redistribution": fields["redistribution"] or "", "explicit": explicit})


# What the traced or simulated steps of a run file communicate, as the signature that `distbench signature` writes.

RUN_SUFFIX = ".jsonl"


def load(file: Path) -> Signature:
    """A signature file, or by its suffix a run file; UserError where it cannot be read, is neither, or has no trace."""
    return of_run_file(file) if file.suffix == RUN_SUFFIX else parse(read_text(file, "signature"), f"signature {file}")


def of_run_file(file: Path) -> Signature:
    """The signature of a run's traced steps: their lowest rank's first step each."""
    run = read_run(file)
    traces = {str(trace["case_id"]): _collectives(trace) for trace in run.traces if not trace.get("error")}
    if not traces:
        how = "trace a step with distbench run SCENARIO --trace-paths, or simulate it"
        raise UserError(f"run file {file} holds no trace of a step, so nothing of what it communicates; {how}")
    try:
        cases = {case: counted(rows) for case, rows in traces.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"run file {file}: a trace lacks {error}; trace it anew with this distbench") from error
    return Signature(
        run.scenario, run.about.mesh or {}, run.about.environment.torch or "unknown", cases, has_peaks=False
    )


def _collectives(trace: Record) -> list[Record]:
    rows = [dict(zip(trace["columns"], row, strict=True)) for row in trace["rows"]]
    first = min(((row.get("rank", 0), row.get("step", 0)) for row in rows), default=(0, 0))
    first_rows = [row for row in rows if (row.get("rank", 0), row.get("step", 0)) == first]
    # A signature has no null: what is in no redistribution is in an empty one.
    return [{**row, "owner": row["owner"] or "", "redistribution": row["redistribution"] or ""} for row in first_rows]


# What changed between two signatures, as sentences that name module, collective, mesh dim and bytes.


def incomparable(base: Signature, new: Signature) -> str | None:
    """Why two signatures cannot be compared; None when they can."""
    if base.scenario != new.scenario:
        return f"scenario {base.scenario} against {new.scenario}"
    if dict(base.mesh) != dict(new.mesh):
        return f"mesh {format_mesh(base.mesh)} against {format_mesh(new.mesh)}"
    return None


def differences(base: Signature, new: Signature) -> list[str]:
    """One sentence for each path that is taken more or less often, and for each case that is on one side only.

    A path that differs in its payload alone is one changed path, not one gone and another come.
    """
    sentences = []
    for case in sorted({*base.cases, *new.cases}):
        if case not in new.cases:
            sentences.append(f"{case}: is gone")
        elif case not in base.cases:
            sentences.append(f"{case}: is new")
        else:
            sentences += [f"{case}: {text}" for text in (*_of_case(base, new, case), *_of_peak(base, new, case))]
    return sentences


def _of_case(base: Signature, new: Signature, case: str) -> list[str]:
    before, after = base.cases[case], new.cases[case]
    change = {path: after.get(path, 0) - before.get(path, 0) for path in {**before, **after}}
    gone = {path: -count for path, count in change.items() if count < 0}
    come = {path: count for path, count in change.items() if count > 0}
    texts = []
    for path, count in list(gone.items()):
        counterpart = next((new_path for new_path in come if _alike(path, new_path) and come[new_path] == count), None)
        if counterpart is not None:
            texts.append(f"{_where(path)}: {count} {_what(path)} of {_size(path)} became {_size(counterpart)}")
            del gone[path], come[counterpart]
    texts += [f"{_where(path)}: {change[path]:+} {_what(path)}, {_size(path)}{path.cause}" for path in (*come, *gone)]
    return sorted(texts)


def _of_peak(base: Signature, new: Signature, case: str) -> list[str]:
    before, after = base.peaks.get(case), new.peaks.get(case)
    # A baseline may have been written when the peak of this case was not predicted.
    if before is None or before == after or not (base.has_peaks and new.has_peaks):
        return []
    texts = [f"{size_text(peak)} ({peak} B)" if peak is not None else "none" for peak in (before, after)]
    return [f"predicted peak memory {texts[0]} became {texts[1]}"]


def _alike(path: CommunicationPath, other_path: CommunicationPath) -> bool:
    return replace(path, payload_bytes=0, dtype="") == replace(other_path, payload_bytes=0, dtype="")


def _where(path: CommunicationPath) -> str:
    return f"{path.owner}, {path.phase}"


def _what(path: CommunicationPath) -> str:
    return f"{path.kind} over {path.mesh_dim} ({path.source})"


def _size(path: CommunicationPath) -> str:
    return f"{size_text(path.payload_bytes)} {path.dtype}"


# The exact gate: signatures against signatures, no tolerance, no machine.
#
# What a plan communicates may depend on the torch version. NAME.signature is then for the torch that wrote it and for
# newer ones, up to the version X.Y of a NAME.torch-X.Y.signature next to it.

SUFFIX = ".signature"
IS_VERSION = re.compile(r"\d+\.\d+")
OF_TORCH = re.compile(rf"(?P<name>.+)\.torch-(?P<release>\d+\.\d+){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class SignatureComparison:
    """What came of it.

    Args:
        changed: file name to what differs in it, one sentence a path.
        uncompared: sentences on files that could not be compared, or stand on one side only.
        same: names of the files without a difference.
        num_paths: in all files compared; 0 means that nothing was compared.
        shown: what differs and is not compared.
    """

    changed: dict[str, list[str]] = field(default_factory=dict)
    uncompared: list[str] = field(default_factory=list)
    same: tuple[str, ...] = ()
    num_paths: int = 0
    shown: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all the same, 1 some difference, 4 not comparable, missing or nothing compared."""
        if self.changed:
            return 1
        return 4 if self.uncompared or not self.num_paths else 0

    @property
    def headline(self) -> str:
        """The verdict, and of how many."""
        word = {0: "PASS", 1: "FAIL", 4: "NO VERDICT"}[self.exit_code]
        summary = f"{len(self.same)} of {len(self.same) + len(self.changed)} signatures as in the baseline"
        return f"{word}: {summary}" + ("" if self.num_paths else "; nothing communicates, so nothing was compared")


def compare(base: Path, new: Path) -> SignatureComparison:
    """Two signature files or run files, or two folders of `*.signature` files by name; UserError for anything else."""
    if base.is_dir() != new.is_dir():
        raise UserError(f"{base} and {new}: give two signature files, or two folders of *{SUFFIX} files")
    if not base.is_dir():
        after = load(new)
        return _compared({new.name: (load(stored_for(base, after.torch)), after)}, [])
    names = {side: sorted({_name(path) for path in side.glob(f"*{SUFFIX}")}) for side in (base, new)}
    if not names[base] and not names[new]:
        raise UserError(f"{base} and {new} hold no *{SUFFIX} file; write some with distbench signature -o")
    alone = [f"{name}: missing in {new}" for name in names[base] if name not in names[new]]
    alone += [f"{name}: not in {base}; --update adds it" for name in names[new] if name not in names[base]]
    afters = {name: load(new / name) for name in names[base] if name in names[new]}
    pairs = {name: (load(stored_for(base / name, after.torch)), after) for name, after in afters.items()}
    return _compared(pairs, alone)


def _name(path: Path) -> str:
    """The file's name without a torch version."""
    match = OF_TORCH.fullmatch(path.name)
    return path.name if match is None else match["name"] + SUFFIX


def stored_for(base: Path, torch: str) -> Path:
    """The file that holds for a torch version: of `base` and each NAME.torch-X.Y.signature next to it the one of the
    newest version that is not newer; `base` where all are."""
    paths = base.parent.glob(f"{glob.escape(base.stem)}.torch-*{SUFFIX}")
    versions = {release(match["release"]): path for path in paths if (match := OF_TORCH.fullmatch(path.name))}
    if not versions or not IS_VERSION.match(torch):
        return base
    with contextlib.suppress(UserError):
        if IS_VERSION.match(own_torch := load(base).torch):
            versions[release(own_torch)] = base
    return (
        versions[max(fitting)] if (fitting := [version for version in versions if version <= release(torch)]) else base
    )


def _of_other_torch(before: Signature, after: Signature) -> bool:
    """Whether the two were written by torch versions that differ by more than a patch."""
    return before.torch.split(".")[:2] != after.torch.split(".")[:2]


def _compared(pairs: dict[str, tuple[Signature, Signature]], alone: list[str]) -> SignatureComparison:
    changed, uncompared, unchanged, num_paths = {}, list(alone), [], 0
    for name, (before, after) in pairs.items():
        if reason := incomparable(before, after):
            uncompared.append(f"{name}: not comparable: {reason}")
            continue
        num_paths += sum(map(len, before.cases.values())) + sum(map(len, after.cases.values()))
        if sentences := differences(before, after):
            if _of_other_torch(before, after):
                more = f" (1 of {count_text(len(sentences), 'difference')})" if len(sentences) > 1 else ""
                uncompared.append(
                    f"{name}: torch {after.torch} communicates something else than torch {before.torch}, which "
                    f"wrote the baseline: {sentences[0]}{more}; compare under one torch, or store this version's with "
                    "--update"
                )
            else:
                changed[name] = sentences
        else:
            unchanged.append(name)
    torches = {(before.torch, after.torch): None for before, after in pairs.values() if before.torch != after.torch}
    torch_lines = tuple(f"torch: {before} in the baseline, {after} in the candidate" for before, after in torches)
    return SignatureComparison(changed, uncompared, tuple(unchanged), num_paths, torch_lines)


def update(base: Path, new: Path) -> list[Path]:
    """Make the baseline what is new; the files written. UserError: a file is no signature, or cannot be written."""
    targets = [(base, new)]
    if new.is_dir():
        targets = [(base / path.name, path) for path in sorted(new.glob(f"*{SUFFIX}"))]
    written_files = []
    for stored, source in targets:
        after = load(source)
        target, text = stored_for(stored, after.torch), after.to_text()
        with contextlib.suppress(UserError):  # what is no signature is replaced
            before = load(target)
            if _of_other_torch(before, after):
                if not differences(before, after):
                    continue
                target = stored.with_name(f"{stored.stem}.torch-{'.'.join(map(str, release(after.torch)))}{SUFFIX}")
        try:
            if target.exists() and not target.is_file():
                raise UserError(f"{target} cannot be written: it is no file; give another file")
            # By bytes: the one that is replaced may be no text at all.
            if not target.exists() or target.read_bytes() != text.encode():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, text)
                written_files.append(target)
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror}; give another file") from error
    return written_files


# What the exact gate found, as a person reads it and as CI does. The worst first.

MAX_LINES = 2000  # in Markdown: a GitHub step summary holds 1 MiB
MORE_LINES = f"\n... {{}} more lines: {TOOL} --signature --format json"


def text(comparison: SignatureComparison) -> str:
    """For a terminal."""
    lines = []
    for name, sentences in comparison.changed.items():
        count = count_text(len(sentences), "difference")
        lines += [f"{name}: {count}", *(f"  {sentence}" for sentence in sentences)]
    lines += [*comparison.uncompared, *comparison.shown, comparison.headline]
    return printable("\n".join(part for line in lines for part in wrap(line, width_here(), "    ")))


def markdown(comparison: SignatureComparison) -> str:
    """For a step summary: a heading with the verdict, then a list a file."""
    changed: list[str] = []
    for name, sentences in comparison.changed.items():
        changed += ["", f"**{markdown_text(name)}**", "", *(f"- {code_span(sentence)}" for sentence in sentences)]
    lines = [f"# exact gate: {comparison.headline}", *capped_lines(changed, MAX_LINES, MORE_LINES)]
    notes = [f"- {markdown_text(sentence)}" for sentence in (*comparison.uncompared, *comparison.shown)]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def json_text(comparison: SignatureComparison) -> str:
    """Everything that was found, as JSON."""
    return json.dumps(
        {"exit_code": comparison.exit_code, "headline": comparison.headline, **asdict(comparison)}, indent=1
    )


def junit_text(comparison: SignatureComparison) -> str:
    """JUnit XML: a test case a file; one that changed is a failure, one that could not be compared an error."""
    outcomes = [
        CiOutcome("signatures", name, "\n".join(texts), "failure") for name, texts in comparison.changed.items()
    ]
    outcomes += [
        CiOutcome("signatures", sentence.partition(":")[0], sentence, "error") for sentence in comparison.uncompared
    ]
    outcomes += [CiOutcome("signatures", name, "as in the baseline") for name in comparison.same]
    if not comparison.num_paths:
        outcomes.append(CiOutcome("signatures", "something was compared", comparison.headline, "error"))
    return junit_xml(outcomes)


def github(comparison: SignatureComparison) -> str:
    """GitHub's annotations: an error for each difference and each file that could not be compared."""
    errors = [(name, sentence) for name, sentences in comparison.changed.items() for sentence in sentences]
    errors += [("not compared", sentence) for sentence in comparison.uncompared]
    lines = annotations({"error": errors})
    return "\n".join(lines if comparison.num_paths else [annotation("error", TOOL, comparison.headline), *lines])


# As `--format` names them; the timing gate has the same in judge/gate_text.py.
FORMS: dict[str, Callable[[SignatureComparison], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": github},
}


TIMEOUT_S = 600.0


def signatures_of(jobs: Sequence[Job], timeout_s: float = TIMEOUT_S) -> list[tuple[Signature, dict[str, str]]]:
    """What the cases of each job communicate, and those that cannot run: case id to what it raises; in the jobs' order.

    One child process runs each case once on a fake process group.

    Raises:
        UserError: a scenario cannot work, none of its cases runs, or the process failed or did not end.
    """
    answers = ask_child(
        "signatures",
        given=[job.to_record() for job in jobs],
        timeout_s=timeout_s,
        failure=f"{_none_of(*jobs)}: {{why}}; see whether distbench run runs it, or give --quick",
    )
    job_answers = list(zip(jobs, answers, strict=True))
    if errors := [f"{_none_of(job)}: {answer['user_error']}" for job, answer in job_answers if "user_error" in answer]:
        raise UserError("; ".join(errors))
    return [(_signature(job, answer), answer["left_out"]) for job, answer in job_answers]


def _signature(job: Job, answer: Mapping[str, Any]) -> Signature:
    cases = {case: counted(record["paths"]) for case, record in answer["cases"].items()}
    peaks = {case: record["peak_bytes"] for case, record in answer["cases"].items() if record["peak_bytes"] is not None}
    return Signature(job.scenario, job.mesh, answer["torch"], cases, peaks)


def _none_of(*jobs: Job) -> str:
    return f"no signature of {', '.join(job.scenario for job in jobs)}"
