"""A recording of a model with few equal layers, extended to all its layers.

In a model of equal layers, the events of a layer repeat with its number: each operator, allocation, wait and message
appears again for the next layer, with the next layer's blocks. `extended` finds these repetitions among the events of a
few recorded layers, checks that two middle layers differ in nothing but their number, and inserts the other layers
between them. The result has the same events as a recording of the whole model; where a check fails, it raises
`NotRepeated`, and the whole model is recorded.
"""

import fnmatch
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from distbench.simulate.recording import (
    MEMORY,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    Operator,
)

LAYERS = ("num_layers", "n_layers", "n_layer", "layers", "depth")  # a scenario's parameter for the number of layers
FEW = 6  # recorded layers of most plans
NO_LAYER = -(10**6)
BLOCK, EVENT = "block", "event"
READS, WRITES = "reads", "writes"  # kinds of tokens in addition to the types of events
Number = tuple[str, int]  # BLOCK or EVENT, and the number of a block or an event


class NotRepeated(Exception):
    """The events of a layer do not repeat in the next layer; the message is the reason."""


class LayerNames(NamedTuple):
    """Names of the modules of equal layers.

    Args:
        prefix: before a layer's number, such as "layers.".
        num_layers: number of layers of the whole model.
        few: number of recorded layers.
    """

    prefix: str
    num_layers: int
    few: int

    @property
    def left(self) -> int:
        """The recorded layer after which the other layers are inserted."""
        return self.few // 2 - 1

    @property
    def right(self) -> int:
        """The recorded layer before which the other layers are inserted."""
        return self.few // 2

    def split(self, name: str) -> tuple[str, int]:
        """Return a module's name without the layer's number, and the number; NO_LAYER for other modules.

        >>> names = LayerNames("layers.", 32, FEW)
        >>> names.split("layers.3.attention"), names.split("norm")
        (('layers.*.attention', 3), ('norm', -1000000))
        """
        if not name.startswith(self.prefix):
            return name, NO_LAYER
        number, dot, rest = name[len(self.prefix) :].partition(".")
        return (f"{self.prefix}*{dot}{rest}", int(number)) if number.isdigit() else (name, NO_LAYER)

    def joined(self, name: str, layer: int) -> str:
        """Return the module's name in a layer, from the name without the number."""
        return name.replace("*", str(layer), 1) if layer != NO_LAYER else name


class Token(NamedTuple):
    """An event, or one tensor that an operator reads or writes.

    Args:
        label: all that is equal in every layer, with the owner as `LayerNames.split` returns it.
        layer: number of the layer, or NO_LAYER.
        named: the block or event that this token defines or uses.
    """

    label: tuple[Any, ...]
    layer: int
    named: Number | None = None


class Place(NamedTuple):
    """The place of a token: in a repeated part, or its index in the list of tokens with `run` -1."""

    run: int
    layer: int
    offset: int


@dataclass(frozen=True)
class Run:
    """Tokens that repeat from layer to layer.

    Args:
        start, period: index of the first token, and number of tokens per layer.
        layers: numbers of the layers in order, ascending or descending.
    """

    start: int
    period: int
    layers: Sequence[int]

    @property
    def ascends(self) -> bool:
        """Whether a later repetition is of a later layer, as in forward."""
        return self.layers[1] > self.layers[0]

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + len(self.layers) * self.period


def repeated_layers(model: Any, few: Any, plan: object, few_plan: object) -> LayerNames:
    """Return the names of the equal layers of a model, of which `few` has the first.

    Raises:
        NotRepeated: the models differ in more than the number of layers, or the plan names single layers.
    """
    first_lacking = next((name for name, _ in model.named_modules() if name not in dict(few.named_modules())), "")
    if (match := re.match(r"((?:.*?\.)?)(\d+)(?:\.|$)", first_lacking)) is None:
        raise NotRepeated("no layer is left out")
    names = LayerNames(match[1], 0, 0)
    parts, few_parts = _layers(model, names), _layers(few, names)
    names = names._replace(num_layers=len(parts) - 1, few=len(few_parts) - 1)
    left, count = names.left, names.num_layers
    if names.few < FEW or count < 2 * FEW:
        raise NotRepeated(f"{names.few} of {count} layers are left")
    pairs = [(parts[layer], few_parts[layer], (count, names.few)) for layer in (NO_LAYER, *range(names.few))]
    pairs += [(parts[left], parts[layer], (left, layer)) for layer in range(left, count)]
    if not all(itertools.starmap(_are_equal, pairs)):
        raise NotRepeated("its layers differ")
    all_names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    patterns = {*_strings(plan)}
    named = (_layers_named(all_names, pattern, names)[left:] for pattern in patterns)
    if patterns != {*_strings(few_plan)} or any(of_layer != of[0] for of in named for of_layer in of):
        raise NotRepeated("the plan names single layers")
    return names


def _layers(model: Any, names: LayerNames) -> dict[int, dict[str, Any]]:
    """Return each layer's properties, by the name of the module or attribute without the layer's number."""
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, module in model.named_modules():
        brief, layer = names.split(name)
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        parts[layer][brief] = (type(module), [(of, part.shape, part.dtype, part.requires_grad) for of, part in tensors])
        for attribute, value in vars(module).items():
            if isinstance(value, bool | int | float | str):
                parts[layer][f"{brief} {attribute}"] = value
    return parts


def _are_equal(part: Mapping[str, Any], other: Mapping[str, Any], numbers: tuple[int, int]) -> bool:
    """Return whether layers or the rests of models are equal; attributes with the two numbers may differ."""
    return part.keys() == other.keys() and all(
        value == other[name] or (value, other[name]) == numbers for name, value in part.items()
    )


def _strings(value: object) -> Iterator[str]:
    """Yield the strings of a plan, among which are all its patterns of names."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _strings(vars(value))
    elif isinstance(value, Mapping):
        yield from _strings([*value.items()])
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from _strings(item)


def _layers_named(all_names: Sequence[str], pattern: str, names: LayerNames) -> list[list[str]]:
    """Return for each layer the names that a pattern matches, without the layer's number."""
    named: list[list[str]] = [[] for _ in range(names.num_layers)]
    for name in fnmatch.filter(all_names, pattern):
        brief, layer = names.split(name)
        if layer != NO_LAYER:
            named[layer].append(brief)
    return named


def extended(events: Sequence[Event], layers_of_blocks: Mapping[int, int], names: LayerNames) -> list[Event]:
    """Return the events of a model with `names.num_layers` layers, from the events of its first `names.few` layers.

    Args:
        layers_of_blocks: the layer of each block that a layer's module or an operator on its parameters allocates.

    Raises:
        NotRepeated: the events do not repeat, or the number of layers changes another part of the step.
    """
    tokens = [*_tokens(events, layers_of_blocks, names)]
    runs = _runs(tokens, names)
    places: list[Place] = [Place(-1, 0, index) for index in range(len(tokens))]
    for number, run in enumerate(runs):
        for turn, layer in enumerate(run.layers):
            for offset in range(run.period):
                places[run.start + turn * run.period + offset] = Place(number, layer, offset)
    middle = (names.left, names.right)
    lost = [token for token, at in zip(tokens, places, strict=True) if at.run < 0 and token.layer in middle]
    if lost:
        raise NotRepeated(f"{lost[0].label} of layer {lost[0].layer} is not repeated")
    defined: dict[Number, int] = {}
    for index, token in enumerate(tokens):
        if token.named is not None:
            defined.setdefault(token.named, index)
    written = _Writer(tokens, runs, places, defined, names).events()
    alive: set[int] = set()
    for event in written:
        if isinstance(event, Allocated):
            alive.add(event.block)
        elif isinstance(event, Freed):
            if event.block not in alive:
                raise NotRepeated(f"block {event.block} would be freed twice")
            alive.remove(event.block)
    return written


def _tokens(events: Sequence[Event], layers_of_blocks: Mapping[int, int], names: LayerNames) -> Iterator[Token]:
    sizes: dict[int, int] = {}

    def of_block(label: tuple[Any, ...], block: int) -> Token:
        return Token(label, layers_of_blocks.get(block, NO_LAYER), (BLOCK, block))

    for event in events:
        if isinstance(event, Operator):
            owner, layer = names.split(event.owner)
            # The numbers of tensors are not part of the label: an optimizer's operator has a tensor per layer.
            label = (Operator, *event[:6], (), (), event.phase, owner, tuple(event.attention))
            yield Token(label, layer)
            for kind, touched in ((READS, event.reads), (WRITES, event.writes)):
                for block, num_bytes in touched:
                    yield of_block((kind, num_bytes), block)
        elif isinstance(event, Collective):
            owner, layer = names.split(event.owner)
            brief_call = event._replace(owner=owner, ranks=tuple(map(tuple, event.ranks)))
            yield Token((Collective, *brief_call), layer)
        elif isinstance(event, EventRecorded | EventWaited):
            yield Token((type(event), event.stream), NO_LAYER, (EVENT, event.event))
        elif isinstance(event, Allocated):
            owner, layer = names.split(event.owner)
            sizes[event.block] = event.num_bytes
            away = layer - layers_of_blocks.get(event.block, NO_LAYER) if layer != NO_LAYER else None
            yield of_block((Allocated, event.num_bytes, event.stream, event.held, owner, away), event.block)
        elif isinstance(event, Freed):
            yield of_block((Freed, sizes[event.block]), event.block)
        else:
            yield Token((type(event), *event), NO_LAYER)


def _runs(tokens: Sequence[Token], names: LayerNames) -> list[Run]:
    """Return the longest repetitions that do not overlap, each of three layers or more, with `left` and `right`."""
    numbers: dict[tuple[Any, ...], int] = {}
    labels = np.array([numbers.setdefault(token.label, len(numbers)) for token in tokens])
    layers = np.array([token.layer for token in tokens])
    repeated: list[tuple[int, int, int]] = []  # start, end, period
    for period in range(1, len(tokens) // 3 + 1):
        same = labels[:-period] == labels[period:]
        if np.count_nonzero(same) < 2 * period:
            continue
        steps = layers[period:] - layers[:-period]
        for step in (1, -1):
            # Tokens without a layer have a difference of 0.
            without = (steps == 0) & (layers[period:] == NO_LAYER)
            edges = np.flatnonzero(np.diff(np.concatenate(([False], same & ((steps == step) | without), [False]))))
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                if end - start >= 2 * period and np.any(layers[start : start + period] != NO_LAYER):
                    repeated.append((int(start), int(end) + period, period))
    runs: list[Run] = []
    taken = np.zeros(len(tokens), dtype=bool)
    for first, last, period in sorted(repeated, key=lambda run: (run[0] - run[1], run[2])):
        if not (free := np.flatnonzero(~taken[first:last])).size:
            continue
        start, end = first + int(free[0]), first + int(free[-1]) + 1
        if taken[start:end].any() or (turns := (end - start) // period) < 3:
            continue
        with_layer = start + int(np.flatnonzero(layers[start:end] != NO_LAYER)[0])
        of_turns = [int(layers[with_layer + turn * period]) for turn in range(turns)]
        if {names.left, names.right} <= {*of_turns}:
            runs.append(Run(start, period, of_turns))
            taken[start : start + turns * period] = True
    return sorted(runs, key=lambda run: run.start)


class _Writer:
    """Writer of the events of all layers."""

    def __init__(
        self,
        tokens: Sequence[Token],
        runs: Sequence[Run],
        places: Sequence[Place],
        defined: Mapping[Number, int],
        names: LayerNames,
    ) -> None:
        self._tokens, self._runs, self._places, self._defined = tokens, runs, places, defined
        self._names, self._inserted = names, names.num_layers - names.few
        self._repeated_targets: dict[int, Place | None] = {}
        self._links: dict[int, Place | None] = {}
        self._used_once: set[Place] = set()  # places in the two middle layers that are used outside of a repetition
        self._numbers: dict[tuple[str, Place], int] = {}
        self._counts = {BLOCK: 0, EVENT: 0}

    def events(self) -> list[Event]:
        """Return the events; raises NotRepeated."""
        written: list[Event] = []
        operator: tuple[int, list[tuple[str, int, int]], str] | None = None
        for index, layer in self._order():
            kind, *fields = self._tokens[index].label
            if operator is not None and kind in (READS, WRITES):
                operator[1].append((kind, self._number(index, layer), fields[0]))
                continue
            if operator is not None:
                written.append(self._operator(*operator))
            owner = self._names.joined(Operator(*fields).owner, self._layer(index, layer)) if kind is Operator else ""
            operator = (index, [], owner) if kind is Operator else None
            if operator is None:
                written.append(self._event(index, layer))
        return [*written, *([self._operator(*operator)] if operator is not None else [])]

    def _order(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of all layers: the index of the token, and the layer of its place in the whole model."""
        index = 0
        for run in [*self._runs, None]:
            end = run.start if run is not None else len(self._tokens)
            yield from ((at, 0) for at in range(index, end))
            if run is None:
                return
            turns = [(turn, self._numbered(layer)) for turn, layer in enumerate(run.layers)]
            left = run.layers.index(self._names.left)
            new = [(left, self._names.right + more) for more in range(self._inserted)]
            at = left + 1 if run.ascends else left
            for turn, layer in (*turns[:at], *(new if run.ascends else reversed(new)), *turns[at:]):
                first = run.start + turn * run.period
                yield from ((at, layer) for at in range(first, first + run.period))
            index = run.end

    def _number(self, index: int, layer: int) -> int:
        """Return the number of the block or event of a token."""
        named = self._tokens[index].named
        assert named is not None
        key = named[0], self._target(index, layer, named)
        if key not in self._numbers:
            self._numbers[key] = self._counts[named[0]]
            self._counts[named[0]] += 1
        return self._numbers[key]

    def _target(self, index: int, layer: int, named: Number) -> Place:
        """Return the place in the whole model where the block or event of a token was defined."""
        if index not in self._links:
            self._links[index] = self._link(index, named)
        if (link := self._links[index]) is None:
            return self._moved(self._defined[named], index)
        return Place(link.run, link.layer + layer - self._names.left, link.offset)

    def _link(self, index: int, named: Number) -> Place | None:
        """Return the target of a repeated token in the layer `left`, if its target is repeated with it."""
        place, target = self._places[index], self._places[self._defined[named]]
        if place.run < 0 or (repeated := self._repeated_target(place)) is None:
            return None
        away = place.layer - self._names.left
        return repeated if target == repeated._replace(layer=repeated.layer + away) else None

    def _moved(self, definition: int, index: int) -> Place:
        """Return the place in the whole model of a definition that a token uses outside of the repetition: as far from
        the first layer as in the recording, or as far from the last layer.
        """
        target, layer = self._places[definition], self._tokens[definition].layer
        if target.run < 0:
            return target
        middle = (self._names.left, self._names.right)
        if layer == NO_LAYER:
            layer = target.layer
            if self._places[index].run < 0 and layer in middle:
                self._used_once.add(target)
            # Uses of both are a loop over all layers, as FSDP2's last waits of torch 2.12.
            if {target._replace(layer=number) for number in middle} <= self._used_once:
                raise NotRepeated(f"{self._tokens[index].label} uses each layer, but is not repeated")
        is_near_first: bool | None = layer < self._names.left
        if layer in middle and (is_near_first := self._is_near_first(index)) is None:
            raise NotRepeated(f"{self._tokens[index].label} uses layer {layer} after all layers")
        return target if is_near_first else target._replace(layer=target.layer + self._inserted)

    def _is_near_first(self, index: int) -> bool | None:
        """Return whether a token is next to the first layer rather than the last; None if it is after the last layer
        and before the first.
        """
        place = self._places[index]
        if place.run >= 0:
            return place.layer <= self._names.left
        after = [not run.ascends for run in self._runs if run.end <= index]
        before = [run.ascends for run in self._runs if run.start > index]
        sides = {*after[-1:], *before[:1]}
        return sides.pop() if len(sides) == 1 else None

    def _repeated_target(self, place: Place) -> Place | None:
        """Return the target of a repeated token in the layer `left`, if the targets are one per layer; None if all
        layers have the same target.
        """
        run = self._runs[place.run]
        first = run.start + place.offset
        if first not in self._repeated_targets:
            of_layers = []
            for layer in (self._names.left, self._names.right):
                named = self._tokens[first + run.layers.index(layer) * run.period].named
                assert named is not None
                of_layers.append(self._places[self._defined[named]])
            left, right = of_layers
            is_repeated = left.run >= 0 and right == left._replace(layer=left.layer + 1)
            if not is_repeated and left != right:
                raise NotRepeated(f"{self._tokens[first].label} uses {left} in one layer, and {right} in the next")
            self._repeated_targets[first] = left if is_repeated else None
        return self._repeated_targets[first]

    def _layer(self, index: int, layer: int) -> int:
        """Return the layer of a token's module in the whole model."""
        token, place = self._tokens[index], self._places[index]
        if token.layer == NO_LAYER:
            return NO_LAYER
        if place.run >= 0:
            return layer + token.layer - place.layer
        return self._numbered(token.layer)

    def _numbered(self, layer: int) -> int:
        """Return the number in the whole model of a recorded layer."""
        return layer + self._inserted if layer >= self._names.right else layer

    def _operator(self, index: int, touched: Sequence[tuple[str, int, int]], owner: str) -> Operator:
        """Return the operator of a token with its tensors in the whole model, (kind, block, bytes)."""
        operator = Operator(*self._tokens[index].label[1:])
        reads, writes = ([(block, size) for of, block, size in touched if of == kind] for kind in (READS, WRITES))
        num_bytes = operator.num_bytes
        if self._places[index].run < 0:
            following = (token.label for token in self._tokens[index + 1 :])
            before = [*itertools.takewhile(lambda label: label[0] in (READS, WRITES), following)]
            if len(before) != len(touched):
                kinds = Counter(label[0] for label in before)
                counts = ((len(reads), kinds[READS]), (len(writes), kinds[WRITES]))
                if operator.kind != MEMORY or any(count and count == few for count, few in counts):
                    raise NotRepeated(f"{operator.name} has a result that depends on the number of layers")
                size, size_before = sum(size for *_, size in touched), sum(label[1] for label in before)
                # Shards of a rank may be empty.
                num_bytes, rest = divmod(num_bytes * size, size_before) if size_before else (num_bytes, 0)
                if rest:
                    raise NotRepeated(f"the bytes of {operator.name} are not proportional to its tensors")
        return operator._replace(owner=owner, num_bytes=num_bytes, reads=reads, writes=writes)

    def _event(self, index: int, layer: int) -> Event:
        token = self._tokens[index]
        kind, *fields = token.label
        if kind is Collective:
            call = Collective(*fields)
            return call._replace(owner=self._names.joined(call.owner, self._layer(index, layer)))
        if kind in (EventRecorded, EventWaited):
            return kind(fields[0], self._number(index, layer))  # type: ignore[no-any-return]
        if kind is Freed:
            return Freed(self._number(index, layer))
        if kind is Allocated:
            num_bytes, stream, held, owner, away = fields
            name = owner if away is None else self._names.joined(owner, self._layer(index, layer) + away)
            return Allocated(self._number(index, layer), num_bytes, stream, held, name)
        return kind(*fields)  # type: ignore[no-any-return]
