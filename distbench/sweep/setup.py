"""What a sweep is of: one scenario, its parameters as they are kept or varied, and the world's ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distbench.spec import Entry, UserError, find, fit_mesh
from distbench.spec.job import parse_choices, variants_of
from distbench.spec.mesh import MAX_RANKS, Mesh, format_mesh, mesh_size
from distbench.spec.plan_knobs import MESH, is_knob
from distbench.spec.printable import count_text
from distbench.sweep.candidates import Candidate, Space, as_written_on, num_parts

BATCH_NAMES = ("batch", "batch_size", "global_batch")


@dataclass(frozen=True)
class Setup:
    """One sweep's question.

    Args:
        base: all parameters of the scenario, and changes to the plan that hold for all candidates.
        world: ranks.
        mesh: the scenario's own, fitted to so many ranks.
        given: texts of --set, for a command to paste.
        note: what was chosen for the user, or empty.
        float8: patterns of modules whose matmuls are predicted in float8.
    """

    entry: Entry
    base: dict[str, Any]
    axes: Mapping[str, Sequence[Any]]
    world: int
    mesh: Mesh
    given: tuple[str, ...]
    quick: bool
    note: str
    float8: tuple[str, ...] = ()

    def space(self, facts: Mapping[str, Any]) -> Space:
        """Every candidate, once it is known what the plan is."""
        pinned = {name for name in self.base if is_knob(name) and name not in self.axes}
        return Space(self.entry.mesh, facts["mesh_dims"], self.world, facts, self.axes, frozenset(pinned))

    def require_meshes(self, space: Space) -> None:
        """Refuse a world that no mesh fits."""
        if not space.meshes:
            batch = space.facts["batch_size"]
            names = ", ".join(dict.fromkeys([*self.entry.mesh, *space.mesh_dims]))
            what = (
                f"no mesh over {names} has {count_text(self.world, 'rank')} that a global batch of "
                f"{batch} can be split over"
            )
            raise UserError(f"{what}; {self._other_batch(space)}")

    def unsplit_text(self, space: Space) -> str:
        """Return why the batch rules meshes out, and which batch would not; empty where it rules none out."""
        if not (unsplit := space.unsplit_meshes):
            return ""
        what = f"a global batch of {space.facts['batch_size']} cannot be split over {unsplit[0].mesh_text}"
        num_all = len(unsplit) + len(space.meshes)
        return f"{what} ({len(unsplit)} of {num_all} meshes; {self._other_batch(space)})"

    def _other_batch(self, space: Space) -> str:
        """The nearest batch that can be split over the first mesh that the batch rules out."""
        batch = space.facts["batch_size"]
        parts = num_parts(space.unsplit_meshes[0].mesh, space.facts["microbatches"])
        fitting = max(round(batch / parts), 1) * parts
        name = next((name for name in BATCH_NAMES if self.base.get(name) == batch), None)
        option = f"--set {name}={fitting}" if name else f"a batch of {fitting} with --set"
        return f"give another --world, or {option}"

    def as_written(self, space: Space) -> Candidate:
        """The scenario's own plan on its own mesh."""
        found = as_written_on(space, self.mesh)
        if found is None:
            names = dict.fromkeys([*self.entry.mesh, *space.mesh_dims])
            if strange := [name for name, size in self.mesh.items() if size > 1 and name not in names]:
                raise UserError(f"--mesh: the plan does not use mesh dim {strange[0]!r}; it uses {', '.join(names)}")
            what = f"a batch of {space.facts['batch_size']} cannot be split over mesh {format_mesh(self.mesh)}"
            raise UserError(f"{what}; give another --mesh, or a batch with --set")
        return found

    def command(self, candidate: Candidate) -> str:
        """The `distbench run` that measures a candidate, and no other value of an axis."""
        chosen = {**{name: self.base[name] for name in self.axes}, **dict(candidate.choices)}
        kept = [text for text in self.given if text.partition("=")[0] not in chosen]
        chosen_texts = [*kept, *(f"{name}={value}" for name, value in chosen.items())]
        options = "".join(f" --set {text}" for text in chosen_texts) + (" --quick" if self.quick else "")
        return f"distbench run {self._target} --mesh {candidate.mesh_text}{options}"

    @property
    def _target(self) -> str:
        from distbench.spec import list_entries

        is_shipped = any(one.file == self.entry.file for one in list_entries())
        return self.entry.name if is_shipped else f"{self.entry.file}::{self.entry.name}"


def set_up(target: str, texts: Sequence[str], world: int | None, mesh: Mapping[str, int] | None, quick: bool) -> Setup:
    """What the user asked for, checked.

    Raises:
        UserError: an unknown scenario, several of them, an unknown axis or value, or a world that no mesh has.
    """
    entries = find(target)
    if len(entries) > 1:
        raise UserError(f"{target} is a file of {len(entries)} scenarios; choose one with FILE::NAME")
    (entry,) = entries
    declared = entry.quick_mesh if quick and entry.quick_mesh else entry.mesh
    size = world if world is not None else mesh_size(mesh or declared)
    if not 1 <= size <= MAX_RANKS:
        raise UserError(f"--world {size} is no number of ranks; give one from 1 to {MAX_RANKS}")
    if mesh and mesh_size(mesh) != size:
        raise UserError(f"--mesh has {count_text(mesh_size(mesh), 'rank')} and --world {size}; leave one of them out")
    chosen = parse_choices(texts, entry.params)
    if MESH in chosen:
        raise UserError(f"a sweep tries all meshes itself; leave --set {MESH} out, or give --world")
    variants_of(entry, chosen, quick)
    base = {**entry.params, **(entry.quick if quick else {}), **{name: values[0] for name, values in chosen.items()}}
    swept = {name: values for name, values in entry.axes.items() if not (quick and name in entry.quick)}
    swept |= {name: tuple(values) for name, values in chosen.items()}
    axes = {name: _own_first(values, base[name]) for name, values in swept.items() if len(values) > 1}
    note, given = _scaled_batch(entry, base, chosen, size, quick), list(texts)
    if note:
        name = next(name for name in BATCH_NAMES if name in base)
        given.append(f"{name}={base[name]}")
    fitted = {**dict.fromkeys(entry.mesh, 1), **mesh} if mesh else fit_mesh(declared, size)
    return Setup(entry, base, axes, size, fitted, tuple(given), quick, note)


def _own_first(values: Sequence[Any], own: Any) -> tuple[Any, ...]:
    return tuple(sorted(values, key=lambda value: value != own))


def _scaled_batch(entry: Entry, base: dict[str, Any], chosen: Mapping[str, Any], world: int, quick: bool) -> str:
    """The batch grown with the world, where the user gave none: what a rank has stays as it was."""
    name = next((name for name in BATCH_NAMES if type(base.get(name)) is int), None)
    own = mesh_size(entry.quick_mesh if quick and entry.quick_mesh else entry.mesh)
    if name is None or name in chosen or world <= own or world % own:
        return ""
    before = base[name]
    base[name] = before * world // own
    return (
        f"{name}={base[name]}, as {before} on the {count_text(own, 'rank')} that {entry.name} is "
        f"written for; --set {name}=N else"
    )
