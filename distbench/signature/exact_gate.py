"""The exact gate: signatures against signatures, no tolerance, no machine."""

from dataclasses import dataclass, field
from pathlib import Path

from distbench.signature.difference import differences, incomparable
from distbench.signature.run_signature import load_either
from distbench.signature.signature_file import Signature, load
from distbench.spec.errors import UserError
from distbench.spec.writing import write_whole

SUFFIX = ".signature"


@dataclass(frozen=True)
class Compared:
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
        counted = f"{len(self.same)} of {len(self.same) + len(self.changed)} signatures as in the baseline"
        return f"{word}: {counted}" + ("" if self.num_paths else "; nothing communicates, so nothing was compared")


def compare(base: Path, new: Path) -> Compared:
    """Two signature files or run files, or two folders of `*.signature` files by name; UserError for anything else."""
    if base.is_dir() != new.is_dir():
        raise UserError(f"{base} and {new}: give two signature files, or two folders of *{SUFFIX} files")
    if not base.is_dir():
        return _compared({new.name: (load_either(base), load_either(new))}, [])
    files = {side: {path.name: path for path in sorted(side.glob(f"*{SUFFIX}"))} for side in (base, new)}
    if not files[base] and not files[new]:
        raise UserError(f"{base} and {new} hold no *{SUFFIX} file; write some with distbench signature -o")
    alone = [f"{name}: missing in {new}" for name in files[base] if name not in files[new]]
    alone += [f"{name}: not in {base}; --update adds it" for name in files[new] if name not in files[base]]
    both = [name for name in files[base] if name in files[new]]
    return _compared({name: (load(files[base][name]), load(files[new][name])) for name in both}, alone)


def _compared(pairs: dict[str, tuple[Signature, Signature]], alone: list[str]) -> Compared:
    changed, uncompared, same, num_paths = {}, list(alone), [], 0
    for name, (before, after) in pairs.items():
        if reason := incomparable(before, after):
            uncompared.append(f"{name}: not comparable: {reason}")
            continue
        num_paths += sum(map(len, before.cases.values())) + sum(map(len, after.cases.values()))
        if found := differences(before, after):
            changed[name] = found
        else:
            same.append(name)
    torches = {(before.torch, after.torch): None for before, after in pairs.values() if before.torch != after.torch}
    shown = tuple(f"torch: {before} in the baseline, {after} in the candidate" for before, after in torches)
    return Compared(changed, uncompared, tuple(same), num_paths, shown)


def update(base: Path, new: Path) -> list[Path]:
    """Make the baseline what is new; the files written. UserError: a file is no signature, or cannot be written."""
    targets = [(base, new)]
    if new.is_dir():
        targets = [(base / path.name, path) for path in sorted(new.glob(f"*{SUFFIX}"))]
    written = []
    for target, source in targets:
        text = load_either(source).to_text()
        try:
            if target.exists() and not target.is_file():
                raise UserError(f"{target} cannot be written: it is no file; give another file")
            # By bytes: the one that is replaced may be no text at all.
            if not target.exists() or target.read_bytes() != text.encode():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, text)
                written.append(target)
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror}; give another file") from error
    return written
