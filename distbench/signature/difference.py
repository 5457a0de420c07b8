"""What changed between two signatures, as sentences that name module, collective, mesh dim and bytes."""

from dataclasses import replace

from distbench.render.units import size_text
from distbench.signature.signature_file import Path, Signature
from distbench.spec.mesh import format_mesh


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
    found = []
    for case in sorted({*base.cases, *new.cases}):
        if case not in new.cases:
            found.append(f"{case}: is gone")
        elif case not in base.cases:
            found.append(f"{case}: is new")
        else:
            found += [f"{case}: {text}" for text in (*_of_case(base, new, case), *_of_peak(base, new, case))]
    return found


def _of_case(base: Signature, new: Signature, case: str) -> list[str]:
    before, after = base.cases[case], new.cases[case]
    change = {path: after.get(path, 0) - before.get(path, 0) for path in {**before, **after}}
    gone = {path: -count for path, count in change.items() if count < 0}
    come = {path: count for path, count in change.items() if count > 0}
    texts = []
    for path, count in list(gone.items()):
        other = next((new_path for new_path in come if _alike(path, new_path) and come[new_path] == count), None)
        if other is not None:
            texts.append(f"{_where(path)}: {count} {_what(path)} of {size(path)} became {size(other)}")
            del gone[path], come[other]
    texts += [f"{_where(path)}: {change[path]:+} {_what(path)}, {size(path)}{_why(path)}" for path in (*come, *gone)]
    return sorted(texts)


def _of_peak(base: Signature, new: Signature, case: str) -> list[str]:
    before, after = base.peaks.get(case), new.peaks.get(case)
    if before == after or not (base.has_peaks and new.has_peaks):
        return []
    texts = [f"{size_text(peak)} ({peak} B)" if peak is not None else "none" for peak in (before, after)]
    return [f"predicted peak memory {texts[0]} became {texts[1]}"]


def _alike(path: Path, other: Path) -> bool:
    return replace(path, payload_bytes=0, dtype="") == replace(other, payload_bytes=0, dtype="")


def _where(path: Path) -> str:
    return f"{path.owner}, {path.phase}"


def _what(path: Path) -> str:
    return f"{path.kind} over {path.mesh_dim} ({path.source})"


def _why(path: Path) -> str:
    return f", {'explicit' if path.explicit else 'implicit'} {path.redistribution}" if path.redistribution else ""


def size(path: Path) -> str:
    """Payload for a person, with its dtype: `8 MiB f32`."""
    return f"{size_text(path.payload_bytes)} {path.dtype}"
