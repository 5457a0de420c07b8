"""Which module runs now, and which one a node of backward belongs to."""

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

from torch import nn

from distbench.worker.torch_internals import next_autograd_position


class RunningModules:
    """Which module runs: in forward the innermost, in backward the one whose forward the node belongs to.

    Each thread numbers its nodes itself. Where checkpointing computes a forward again on autograd's thread, as on
    accelerators, nodes of backward still have the numbers of the first one: of the thread that this was made on.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._stack: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._thread = threading.get_ident()

    @property
    def has_run(self) -> bool:
        """Whether a module's forward has ended."""
        return bool(self._spans)

    def is_after(self, position: int | None) -> bool:
        """Whether a node was made after all modules had run: the loss's."""
        return position is not None and position >= max(end for _, end, _ in self._spans)

    def holder_of(self, parameter: object) -> str | None:
        """The name of the module that has a parameter, empty for the root; None where it is none of the model's."""
        if parameter is None or self._model is None:
            return None
        names = (name for name, one in self._model.named_parameters() if one is parameter)
        name = next(names, None)
        return None if name is None else name.rpartition(".")[0]

    def enter(self, name: str, *_: object) -> None:
        """A module's forward begins."""
        self._stack.append((name, next_autograd_position()))

    def leave(self, *_: object) -> None:
        """The innermost module's forward ends."""
        name, start = self._stack.pop()
        if threading.get_ident() == self._thread:
            self._spans.append((start, next_autograd_position(), name))

    @property
    def running(self) -> str | None:
        """The innermost module whose forward has begun and not ended."""
        return self._stack[-1][0] if self._stack else None

    def owner(self, running: str | None, position: int | None) -> str | None:
        """The module that ran, or that the node of this sequence number belongs to; empty for the root, or None."""
        if running is not None or position is None:
            return running
        around = [(end - start, name) for start, end, name in self._spans if start <= position < end]
        return min(around)[1] if around else None


@contextlib.contextmanager
def running_modules(model: nn.Module | None) -> Iterator[RunningModules]:
    """Hooks on every module, outermost: what a parallel style's own hooks communicate belongs to its module."""
    modules = RunningModules(model)
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules() if model is not None else ():
            hooks.enter_context(module.register_forward_pre_hook(partial(modules.enter, name), prepend=True))
            hooks.enter_context(module.register_forward_hook(modules.leave, always_call=True))
        yield modules
