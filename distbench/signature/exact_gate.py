"""The exact gate: signatures against signatures, no tolerance, no machine.

What a plan communicates may depend on the torch version. NAME.signature is then for the torch that wrote it and for
newer ones, up to the version X.Y of a NAME.torch-X.Y.signature next to it.
"""

import contextlib
import glob
import re
from dataclasses import dataclass, field
from pathlib import Path

from distbench.signature.difference import differences, incomparable
from distbench.signature.run_signature import load_either
from distbench.signature.signature_file import Signature, load
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text
from distbench.spec.versions import release
from distbench.spec.writing import write_whole

SUFFIX = ".signature"
IS_VERSION = re.compile(r"\d+\.\d+")
OF_TORCH = re.compile(rf"(?P<name>.+)\.torch-(?P<release>\d+\.\d+){re.escape(SUFFIX)}")


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
        after = load_either(new)
        return _compared({new.name: (load_either(stored_for(base, after.torch)), after)}, [])
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
        if IS_VERSION.match(own := load(base).torch):
            versions[release(own)] = base
    return versions[max(fitting)] if (fitting := [one for one in versions if one <= release(torch)]) else base


def _of_other_torch(before: Signature, after: Signature) -> bool:
    """Whether the two were written by torch versions that differ by more than a patch."""
    return before.torch.split(".")[:2] != after.torch.split(".")[:2]


def _compared(pairs: dict[str, tuple[Signature, Signature]], alone: list[str]) -> Compared:
    changed, uncompared, same, num_paths = {}, list(alone), [], 0
    for name, (before, after) in pairs.items():
        if reason := incomparable(before, after):
            uncompared.append(f"{name}: not comparable: {reason}")
            continue
        num_paths += sum(map(len, before.cases.values())) + sum(map(len, after.cases.values()))
        if found := differences(before, after):
            if _of_other_torch(before, after):
                more = f" (1 of {count_text(len(found), 'difference')})" if len(found) > 1 else ""
                uncompared.append(
                    f"{name}: torch {after.torch} communicates something else than torch {before.torch}, which wrote "
                    f"the baseline: {found[0]}{more}; compare under one torch, or store this version's with --update"
                )
            else:
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
    for stored, source in targets:
        after = load_either(source)
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
                written.append(target)
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror}; give another file") from error
    return written
