"""The candidates of a sweep: one scenario, meshes of the ranks of its world, and changes to the plan, as plain data."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from distbench.spec import Entry, UserError, find, fit_mesh, list_entries
from distbench.spec.job import MESH, PREFIX, brief_mesh, is_knob, parse_choices, variants_of
from distbench.spec.mesh import BATCH_DIMS, MAX_RANKS, MESH_DIMS, Mesh, format_mesh, mesh_size
from distbench.spec.plan import ROTATIONS
from distbench.spec.printable_text import count_text

MICROBATCHES = (1, 2, 4, 8)
AHEAD = 2  # FSDP units gathered ahead
AS_WRITTEN = "as written"
PLAN_LOSS = "plan.loss"
BATCH_NAMES = ("batch", "batch_size", "global_batch")


@dataclass(frozen=True)
class Candidate:
    """One plan on one mesh.

    Args:
        sizes: mesh dims with their sizes, outermost first.
        choices: differences from the scenario, by name: its own parameters, and changes to the plan.
    """

    sizes: tuple[tuple[str, int], ...]
    choices: tuple[tuple[str, Any], ...] = ()

    @property
    def mesh(self) -> Mesh:
        """Mesh dim to size."""
        return dict(self.sizes)

    @property
    def mesh_text(self) -> str:
        """Text such as `dp_shard=8,tp=8`, without mesh dims of one rank."""
        return ",".join(f"{name}={size}" for name, size in self.sizes if size > 1) or f"{self.sizes[0][0]}=1"

    @property
    def changes_text(self) -> str:
        """Text such as `checkpoint=full, microbatches=2`, or AS_WRITTEN."""
        return ", ".join(f"{name.removeprefix(PREFIX)}={value}" for name, value in self.choices) or AS_WRITTEN

    @property
    def text(self) -> str:
        """Both."""
        return f"{self.mesh_text}; {self.changes_text}" if self.choices else self.mesh_text

    def with_choice(self, name: str, value: Any) -> "Candidate":
        """Return this candidate with a change added or replaced."""
        return replace(self, choices=tuple(sorted({**dict(self.choices), name: value}.items())))

    def variant(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return all parameters of the scenario's variant, including unchanged parameters of `base`."""
        return {**base, **dict(self.choices), MESH: brief_mesh(self.mesh)}


@dataclass(frozen=True)
class Space:
    """Every candidate of a sweep.

    Args:
        declared: the scenario's own mesh, whose mesh dims every candidate has.
        mesh_dims: mesh dims that the plan uses.
        world: ranks.
        facts: the child process's facts of the plan and the model.
        axes: the scenario's own parameters with several values; the first value is the value as written.
        pinned: names that the user has chosen, which are not changed.
    """

    declared: Mapping[str, int]
    mesh_dims: Sequence[str]
    world: int
    facts: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    pinned: frozenset[str] = frozenset()

    @cached_property
    def meshes(self) -> list[Candidate]:
        """One candidate as written per mesh that divides the batch; meshes that shard most parameters over few fast
        links come first.
        """
        microbatches = self.facts["microbatches"] or 1
        return [candidate for candidate in self._all_meshes if self._splits(candidate.mesh, microbatches)]

    @cached_property
    def unsplit_meshes(self) -> list[Candidate]:
        """The meshes that do not divide the batch, in the same order."""
        return [candidate for candidate in self._all_meshes if candidate not in self.meshes]

    @cached_property
    def _all_meshes(self) -> list[Candidate]:
        # Declared mesh dims remain in order, and each mesh dim of the plan is inserted before its first successor in
        # MESH_DIMS: torch accepts several mesh dims, as of hybrid sharding, in the mesh's order only.
        names = list(self.declared)
        for name in reversed(MESH_DIMS):
            if name in self.mesh_dims and name not in names:
                inner = MESH_DIMS[MESH_DIMS.index(name) + 1 :]
                place = next((place for place, mesh_dim in enumerate(names) if mesh_dim in inner), len(names))
                names.insert(place, name)
        candidates = []
        for sizes in factorizations(self.world, len(names)):
            mesh = zip(names, sizes, strict=True)
            candidates.append(Candidate(tuple((name, n) for name, n in mesh if n > 1 or name in self.declared)))
        # Ranks that exchange activations need fast links. Replicas shard nothing.
        return sorted(
            candidates,
            key=lambda candidate: (
                candidate.mesh.get("tp", 1) * candidate.mesh.get("cp", 1),
                candidate.mesh.get("dp_replicate", 1),
            ),
        )

    def alternatives(self, candidate: Candidate) -> dict[str, list[Any]]:
        """Return the possible changes of a candidate, from names to all values, the value as written first."""
        mesh, facts = candidate.mesh, self.facts
        choices: dict[str, list[Any]] = {name: list(values) for name, values in self.axes.items()}
        if (now := facts["microbatches"]) is not None:
            choices["plan.microbatches"] = [now, *(n for n in MICROBATCHES if n != now and self._splits(mesh, n))]
        if facts["checkpointable"]:
            is_whole = facts["checkpoint"] and not facts["is_selective"]
            checkpoints = [*(["none"] if facts["checkpoint"] else []), *([] if is_whole else ["full"])]
            choices["plan.checkpoint"] = [AS_WRITTEN, *checkpoints]
        if (fsdp := facts["fsdp"]) is not None:
            reshards = fsdp["reshard_after_forward"]
            choices["plan.reshard_after_forward"] = [reshards, reshards is False]
            if not fsdp["prefetch"]:
                choices["plan.prefetch"] = [None, AHEAD]
            if not fsdp["mixed_precision"]:
                choices["plan.mixed_precision"] = ["none", "bf16"]
        if (loss := facts.get("loss")) is not None:
            choices[PLAN_LOSS] = [loss, *(value for value in ("none", "compiled") if value != loss)]
        if (cp := facts["cp"]) is not None and mesh.get(cp["mesh_dim"], 1) > 1:
            choices["plan.rotate"] = [cp["rotate"], *(rotation for rotation in ROTATIONS if rotation != cp["rotate"])]
            choices["plan.load_balance"] = [cp["load_balance"], not cp["load_balance"]]
        # A change that an axis of the scenario makes is left to that axis.
        by_axes = {f"{PREFIX}{name}" for name in self.axes}
        left_out = self.pinned | by_axes
        return {name: values for name, values in choices.items() if len(values) > 1 and name not in left_out}

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that differ from a candidate by one change."""
        chosen = dict(candidate.choices)
        for name, values in self.alternatives(candidate).items():
            now = chosen.get(name, values[0])
            without = replace(candidate, choices=tuple(choice for choice in candidate.choices if choice[0] != name))
            for value in values:
                if value != now:
                    yield without if value == values[0] else without.with_choice(name, value)

    def recorded_as(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the recording to use: the replay compiles the loss, as a rule."""
        if dict(candidate.choices).get(PLAN_LOSS) != "compiled":
            return candidate
        other_choices = tuple(choice for choice in candidate.choices if choice[0] != PLAN_LOSS)
        uncompiled = replace(candidate, choices=other_choices)
        return uncompiled if self.facts["loss"] == "none" else uncompiled.with_choice(PLAN_LOSS, "none")

    def moved_meshes(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates whose mesh differs by one factor, moved to another mesh dim."""
        sizes = candidate.mesh
        by_ratio = []
        for other_candidate in self.meshes:
            names = set(sizes) | set(other_candidate.mesh)
            ratios = [other_candidate.mesh.get(name, 1) / sizes.get(name, 1) for name in names]
            if sum(ratio != 1 for ratio in ratios) == 2:
                by_ratio.append((max(ratios), replace(other_candidate, choices=candidate.choices)))
        least = min((ratio for ratio, _ in by_ratio), default=1.0)
        return [other_candidate for ratio, other_candidate in by_ratio if ratio == least]

    def around(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates that differ from a candidate by one change, or by one factor of the mesh."""
        return [*self.neighbours(candidate), *self.moved_meshes(candidate)]

    def _splits(self, mesh: Mapping[str, int], microbatches: int) -> bool:
        return self.facts["batch_size"] % num_parts(mesh, microbatches) == 0


def num_parts(mesh: Mapping[str, int], microbatches: int) -> int:
    """Return the number of parts of a global batch."""
    return math.prod(mesh.get(name, 1) for name in BATCH_DIMS) * microbatches


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered product of `count` factors of 1 or more that equals a number."""
    if count == 1:
        yield (number,)
        return
    for first in (divisor for divisor in range(1, number + 1) if number % divisor == 0):
        yield from ((first, *rest) for rest in factorizations(number // first, count - 1))


def count_of(space: Space) -> int:
    """Return the total number of candidates."""
    return sum(
        math.prod(len(values) for values in space.alternatives(candidate).values()) for candidate in space.meshes
    )


def all_of(space: Space) -> Iterator[Candidate]:
    """Yield every candidate, mesh by mesh, as written first."""
    for candidate in space.meshes:
        options = space.alternatives(candidate)
        for values in itertools.product(*options.values()):
            chosen = dict(zip(options, values, strict=True))
            changes = sorted((name, value) for name, value in chosen.items() if value != options[name][0])
            yield replace(candidate, choices=tuple(changes))


def lower_bound_bytes(facts: Mapping[str, Any], mesh: Mapping[str, int]) -> int:
    """Return a lower bound of a rank's bytes when the optimizer steps: shards of parameters, and of gradients and
    optimizer state of trained parameters, if all sharding mesh dims sharded every parameter.
    """
    shards = math.prod(mesh.get(name, 1) for name in facts["shard_dims"])
    return int((facts["parameter_bytes"] + facts["trained_bytes"] * (1 + facts["optimizer_share"])) / shards)


@dataclass(frozen=True)
class Setup:
    """The request of a sweep.

    Args:
        base: all parameters of the scenario, and changes to the plan of all candidates.
        world: ranks.
        mesh: the scenario's own mesh, scaled to `world` ranks.
        given: the user's --set texts, for the printed command.
        note: sentence on values chosen for the user, or "".
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
        """Return the space of candidates, from facts of the plan."""
        pinned = {name for name in self.base if is_knob(name) and name not in self.axes}
        return Space(self.entry.mesh, facts["mesh_dims"], self.world, facts, self.axes, frozenset(pinned))

    def require_meshes(self, space: Space) -> None:
        """Reject a world size without a fitting mesh."""
        if not space.meshes:
            names = ", ".join(dict.fromkeys([*self.entry.mesh, *space.mesh_dims]))
            batch = f"a global batch of {space.facts['batch_size']} can be split"
            problem = f"no mesh over {names} has {count_text(self.world, 'rank')} over which {batch}"
            raise UserError(f"{problem}; {self._other_batch(space)}")

    def unsplit_text(self, space: Space) -> str:
        """Return a sentence on meshes that the batch rules out, with a batch that fits; "" without a ruled-out mesh."""
        if not (unsplit := space.unsplit_meshes):
            return ""
        problem = f"a global batch of {space.facts['batch_size']} cannot be split over {unsplit[0].mesh_text}"
        num_all = len(unsplit) + len(space.meshes)
        return f"{problem} ({len(unsplit)} of {num_all} meshes; {self._other_batch(space)})"

    def _other_batch(self, space: Space) -> str:
        """Return advice with the nearest batch that the first ruled-out mesh divides."""
        batch = space.facts["batch_size"]
        parts = num_parts(space.unsplit_meshes[0].mesh, space.facts["microbatches"] or 1)
        fitting = max(round(batch / parts), 1) * parts
        name = next((name for name in BATCH_NAMES if self.base.get(name) == batch), None)
        option = f"--set {name}={fitting}" if name else f"a batch of {fitting} with --set"
        return f"give another --world, or {option}"

    def as_written(self, space: Space) -> Candidate:
        """Return the scenario's own plan on its own mesh."""
        sizes = {name: size for name, size in self.mesh.items() if size > 1}
        for candidate in space.meshes:
            if {name: size for name, size in candidate.mesh.items() if size > 1} == sizes:
                return candidate
        names = dict.fromkeys([*self.entry.mesh, *space.mesh_dims])
        if strange := [name for name in sizes if name not in names]:
            raise UserError(f"the plan does not use mesh dim {strange[0]!r} of --mesh; use {', '.join(names)}")
        problem = f"a batch of {space.facts['batch_size']} cannot be split over mesh {format_mesh(self.mesh)}"
        raise UserError(f"{problem}; give another --mesh, or a batch with --set")

    def command(self, candidate: Candidate) -> str:
        """Return the `distbench run` command that measures a candidate, with single values of all axes."""
        chosen = {**{name: self.base[name] for name in self.axes}, **dict(candidate.choices)}
        kept = [text for text in self.given if text.partition("=")[0] not in chosen]
        chosen_texts = [*kept, *(f"{name}={value}" for name, value in chosen.items())]
        options = "".join(f" --set {text}" for text in chosen_texts) + (" --quick" if self.quick else "")
        is_shipped = any(entry.file == self.entry.file for entry in list_entries())
        target = self.entry.name if is_shipped else f"{self.entry.file}::{self.entry.name}"
        return f"distbench run {target} --mesh {candidate.mesh_text}{options}"


def set_up(target: str, texts: Sequence[str], world: int | None, mesh: Mapping[str, int] | None, quick: bool) -> Setup:
    """Check the user's request.

    Raises:
        UserError: the scenario, axis or value is unknown, the target has several scenarios, or no mesh has `world`
            ranks.
    """
    entries = find(target)
    if len(entries) > 1:
        raise UserError(f"{target} is a file of {len(entries)} scenarios; choose a scenario with FILE::NAME")
    (entry,) = entries
    declared = entry.quick_mesh if quick and entry.quick_mesh else entry.mesh
    size = world if world is not None else mesh_size(mesh or declared)
    if not 1 <= size <= MAX_RANKS:
        raise UserError(f"--world {size} is not a number of ranks; use 1 to {MAX_RANKS}")
    if mesh and mesh_size(mesh) != size:
        raise UserError(f"--mesh has {count_text(mesh_size(mesh), 'rank')} and --world {size}; leave one of them out")
    chosen = parse_choices(texts, entry.params)
    if MESH in chosen:
        raise UserError(f"a sweep tries all meshes itself; leave --set {MESH} out, or give --world")
    variants_of(entry, chosen, quick)
    base = {**entry.params, **(entry.quick if quick else {}), **{name: values[0] for name, values in chosen.items()}}
    swept = {name: values for name, values in entry.axes.items() if not (quick and name in entry.quick)}
    swept |= {name: tuple(values) for name, values in chosen.items()}
    several = {name: values for name, values in swept.items() if len(values) > 1}
    axes = {name: tuple(sorted(values, key=lambda value: value != base[name])) for name, values in several.items()}
    note, all_texts = _scaled_batch(entry, base, chosen, size, quick), list(texts)
    # Add a recipe's configuration, which is not in the scenario's name.
    all_texts += [
        f"{name}={values[0]}" for name, values in entry.axes.items() if len(values) == 1 and name not in chosen
    ]
    if note:
        name = next(name for name in BATCH_NAMES if name in base)
        all_texts.append(f"{name}={base[name]}")
    fitted = {**dict.fromkeys(entry.mesh, 1), **mesh} if mesh else fit_mesh(declared, size)
    return Setup(entry, base, axes, size, fitted, tuple(all_texts), quick, note)


def _scaled_batch(entry: Entry, base: dict[str, Any], chosen: Mapping[str, Any], world: int, quick: bool) -> str:
    """Scale the batch with the world size if the user gave no batch, so that each rank's part is unchanged."""
    name = next((name for name in BATCH_NAMES if type(base.get(name)) is int), None)
    num_ranks = mesh_size(entry.quick_mesh if quick and entry.quick_mesh else entry.mesh)
    if name is None or name in chosen or world <= num_ranks or world % num_ranks:
        return ""
    before = base[name]
    base[name] = before * world // num_ranks
    scaled = f"from {before} ({count_text(num_ranks, 'rank')}) to {base[name]} ({count_text(world, 'rank')})"
    return f"global batch scaled {scaled}; change with --set {name}=N"
