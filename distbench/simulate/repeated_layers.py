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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

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

FEW = 6  # recorded layers
LEFT, RIGHT = 2, 3  # the other layers are inserted between these two
NO_LAYER = -(10**6)
BLOCK, EVENT = "block", "event"
Number = tuple[str, int]  # BLOCK or EVENT, and the number of a block or an event


class NotRepeated(Exception):
    """The events of a layer do not repeat in the next layer; the message is the reason."""


class LayerNames(NamedTuple):
    """Names of the modules of equal layers.

    Args:
        prefix: before a layer's number, such as "layers.".
        count: number of layers of the whole model.
    """

    prefix: str
    count: int

    def split(self, name: str) -> tuple[str, int]:
        """Return a module's name without the layer's number, and the number; NO_LAYER for other modules.

        >>> LayerNames("layers.", 32).split("layers.3.attention"), LayerNames("layers.", 32).split("norm")
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

    def moved(self, inserted: int) -> "Place":
        """Return the place among the tokens of all layers, for a token that is not repeated itself."""
        return self._replace(layer=self.layer + inserted) if self.run >= 0 and self.layer >= RIGHT else self


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


def repeated_layers(model: nn.Module, few: nn.Module, plan: object, few_plan: object) -> LayerNames:
    """Return the names of the equal layers of a model, of which `few` has the first.

    Raises:
        NotRepeated: the models differ in more than the number of layers, or the plan names single layers.
    """
    first_lacking = next((name for name, _ in model.named_modules() if name not in dict(few.named_modules())), "")
    if (match := re.match(r"((?:.*?\.)?)(\d+)(?:\.|$)", first_lacking)) is None:
        raise NotRepeated("no layer is left out")
    names = LayerNames(match[1], 0)
    parts, few_parts = _layers(model, names), _layers(few, names)
    count = len(parts) - 1
    if len(few_parts) - 1 != FEW or count < 2 * FEW:
        raise NotRepeated(f"{len(few_parts) - 1} of {count} layers are left")
    pairs = [(parts[layer], few_parts[layer], (count, FEW)) for layer in (NO_LAYER, *range(FEW))]
    pairs += [(parts[LEFT], parts[layer], (LEFT, layer)) for layer in range(LEFT, count)]
    if not all(itertools.starmap(_are_equal, pairs)):
        raise NotRepeated("its layers differ")
    all_names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    if {*_strings(plan)} != {*_strings(few_plan)} or any(
        len({*map(frozenset, _layers_named(all_names, pattern, names, count))}) > 1 for pattern in _strings(plan)
    ):
        raise NotRepeated("the plan names single layers")
    return names._replace(count=count)


def _layers(model: nn.Module, names: LayerNames) -> dict[int, dict[str, Any]]:
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


def _layers_named(all_names: Sequence[str], pattern: str, names: LayerNames, count: int) -> list[list[str]]:
    """Return for each layer the names that a pattern matches, without the layer's number."""
    named: list[list[str]] = [[] for _ in range(count)]
    for name in fnmatch.filter(all_names, pattern):
        brief, layer = names.split(name)
        if layer != NO_LAYER:
            named[layer].append(brief)
    return named


def extended(
    events: Sequence[Event], layers_of_blocks: Mapping[int, int], names: LayerNames, few: int = FEW
) -> list[Event]:
    """Return the events of a model with `names.count` layers, from the events of its first `few` layers.

    Args:
        events: of a recording with `few` layers.
        layers_of_blocks: layers of blocks: of parameters and what was computed from them, and by the allocating module.

    Raises:
        NotRepeated: the events do not repeat, or the number of layers changes another part of the step.
    """
    tokens = [*_tokens(events, layers_of_blocks, names)]
    runs = _runs(tokens)
    places: list[Place] = [Place(-1, 0, index) for index in range(len(tokens))]
    for number, run in enumerate(runs):
        for turn, layer in enumerate(run.layers):
            for offset in range(run.period):
                places[run.start + turn * run.period + offset] = Place(number, layer, offset)
    if lost := next((token for token, at in zip(tokens, places, strict=True) if at.run < 0 and token.layer in (LEFT, RIGHT)), None):
        raise NotRepeated(f"{lost.label} of layer {lost.layer} is not repeated")
    defined: dict[Number, Place] = {}
    for token, place in zip(tokens, places, strict=True):
        if token.named is not None:
            defined.setdefault(token.named, place)
    return _Writer(tokens, runs, places, defined, names, names.count - few).events()


def _tokens(events: Sequence[Event], layers_of_blocks: Mapping[int, int], names: LayerNames) -> Iterator[Token]:
    sizes: dict[int, int] = {}

    def of_block(label: tuple[Any, ...], block: int) -> Token:
        return Token(label, layers_of_blocks.get(block, NO_LAYER), (BLOCK, block))

    for event in events:
        if isinstance(event, Operator):
            owner, layer = names.split(event.owner)
            # The numbers of tensors are not part of the label: an optimizer's operator has a tensor per layer.
            brief = event._replace(owner=owner, reads=(), writes=(), attention=tuple(event.attention))
            yield Token((Operator, *brief), layer)
            for kind, touched in (("reads", event.reads), ("writes", event.writes)):
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


def _runs(tokens: Sequence[Token]) -> list[Run]:
    """Return the longest repetitions that do not overlap, each of three layers at least, with LEFT and RIGHT."""
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
    for start, end, period in sorted(repeated, key=lambda run: (run[0] - run[1], run[2])):
        while start < end and taken[start]:
            start += 1
        while start < end and taken[end - 1]:
            end -= 1
        if taken[start:end].any() or (turns := (end - start) // period) < 3:
            continue
        with_layer = start + int(np.flatnonzero(layers[start:end] != NO_LAYER)[0])
        of_turns = [int(layers[with_layer + turn * period]) for turn in range(turns)]
        if {LEFT, RIGHT} <= {*of_turns}:
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
        defined: Mapping[Number, Place],
        names: LayerNames,
        inserted: int,
    ) -> None:
        self._tokens, self._runs, self._places, self._defined = tokens, runs, places, defined
        self._names, self._inserted = names, inserted
        self._numbers: dict[tuple[str, Place], int] = {}
        self._counts = {BLOCK: 0, EVENT: 0}

    def events(self) -> list[Event]:
        """Return the events; raises NotRepeated."""
        written: list[Event] = []
        pending: tuple[int, Token, str] | None = None
        touched: list[tuple[str, int, int]] = []

        def end_operator() -> None:
            if pending is not None:
                written.append(self._operator(*pending, touched))

        for index, layer in self._order():
            token = self._tokens[index]
            kind = token.label[0]
            if kind in ("reads", "writes"):
                touched.append((kind, self._number(index, layer), token.label[1]))
                continue
            end_operator()
            pending, touched = None, []
            if kind is Operator:
                pending = (index, token, self._owner(index, layer))
            else:
                written.append(self._event(index, layer))
        end_operator()
        return written

    def _order(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of all layers: the index of the token, and the layer of its place in the whole model."""
        index = 0
        for run in [*self._runs, None]:
            end = run.start if run is not None else len(self._tokens)
            yield from ((at, 0) for at in range(index, end))
            if run is None:
                return
            turns = [(turn, layer + (self._inserted if layer >= RIGHT else 0)) for turn, layer in enumerate(run.layers)]
            left = run.layers.index(LEFT)
            new = [(left, LEFT + 1 + more) for more in range(self._inserted)]
            ascends = run.layers[1] > run.layers[0]
            at = left + 1 if ascends else left
            for turn, layer in (*turns[:at], *(new if ascends else reversed(new)), *turns[at:]):
                first = run.start + turn * run.period
                yield from ((at, layer) for at in range(first, first + run.period))
            index = run.start + len(run.layers) * run.period

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
        place, target = self._places[index], self._defined[named]
        if place.run < 0:
            return target.moved(self._inserted)
        run = self._runs[place.run]

        def of_layer(number: int) -> Place:
            other = self._tokens[run.start + run.layers.index(number) * run.period + place.offset].named
            assert other is not None
            return self._defined[other]

        left, right = of_layer(LEFT), of_layer(RIGHT)
        if left.run == right.run >= 0 and left.offset == right.offset and right.layer - left.layer == 1:
            if target == left._replace(layer=left.layer + place.layer - LEFT):
                return left._replace(layer=left.layer + layer - LEFT)
        elif left != right:
            raise NotRepeated(f"{self._tokens[index].label} uses {left} in one layer, and {right} in the next")
        return target.moved(self._inserted)

    def _layer(self, index: int, layer: int) -> int:
        """Return the layer of a token's module in the whole model."""
        token, place = self._tokens[index], self._places[index]
        if token.layer == NO_LAYER:
            return NO_LAYER
        if place.run >= 0:
            return layer + token.layer - place.layer
        return token.layer + (self._inserted if token.layer >= RIGHT else 0)

    def _owner(self, index: int, layer: int) -> str:
        owner: str = Operator(*self._tokens[index].label[1:]).owner
        return self._names.joined(owner, self._layer(index, layer))

    def _operator(self, index: int, token: Token, owner: str, touched: Sequence[tuple[str, int, int]]) -> Operator:
        recorded = Operator(*token.label[1:])
        tensors = {kind: [(block, size) for of, block, size in touched if of == kind] for kind in ("reads", "writes")}
        num_bytes = recorded.num_bytes
        before = self._touched_before(index)
        if len(touched) != len(before):
            grown = {kind: len(tensors[kind]) > sum(of == kind for of, _ in before) for kind in tensors}
            size, old_size = sum(size for *_, size in touched), sum(size for _, size in before)
            if recorded.kind != MEMORY or not all(grown[kind] or not tensors[kind] for kind in tensors):
                raise NotRepeated(f"{recorded.name} has a result that depends on the number of layers")
            if num_bytes * size % old_size:
                raise NotRepeated(f"the bytes of {recorded.name} are not proportional to its tensors")
            num_bytes = num_bytes * size // old_size
        return recorded._replace(owner=owner, num_bytes=num_bytes, **tensors)

    def _touched_before(self, index: int) -> list[tuple[str, int]]:
        touched = []
        for token in self._tokens[index + 1 :]:
            if token.label[0] not in ("reads", "writes"):
                break
            touched.append((token.label[0], token.label[1]))
        return touched

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
