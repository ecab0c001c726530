"""The steps of puts and gets, for tests in which something happens between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mooncake_store import Store
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.compiled_calls import watched

__all__ = ["GET_STEPS", "PUT_STEPS", "Steps"]

PUT_STEPS = ("ask", "write", "conclude")
GET_STEPS = ("ask", "read", "let_go")  # the last: all has moved, and the lease is about to end


class Steps:
    """Sees the steps of one store, whether compiled code or Python takes them.

    Attributes:
        compiled: how often it was compiled code that came to a step at which something was to be done.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self._action: Callable[[], None] | None = None
        self._awaited = ""
        self._calls = 0
        self._done: list[str] = []

    @contextmanager
    def watch(self, engine: TransferEngine) -> Iterator[None]:
        """A store that is opened meanwhile on the engine is seen."""
        whole = engine.compiled_calls()
        engine.compiled_calls = lambda: watched(whole, self._by_compiled_code)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del engine.compiled_calls

    @contextmanager
    def before(self, store: Store, step: str, action: Callable[[], None]) -> Iterator[list[str]]:
        """Do something before the store takes this step next; the step is in the list once that was done."""
        owner: Any = store._mover if step in ("read", "write") else store._member
        original = getattr(owner, step)

        def run(*arguments: Any, **options: Any) -> Any:
            self._act()
            return original(*arguments, **options)

        self._done, self._calls = [], 0
        self._awaited, self._action = step, action
        setattr(owner, step, run)
        try:
            yield self._done
        finally:
            self._action = None
            delattr(owner, step)

    def _by_compiled_code(self, what: str) -> None:
        if what == "call":
            self._calls += 1
        # A put asks twice, a get once.
        asks = ("ask",) if self._calls == 1 else ("conclude",)
        found = {"call": asks, "begin": ("read", "write"), "end": ("let_go",)}.get(what, ())
        if self._awaited in found and self._action is not None:
            self.compiled += 1
            self._act()

    def _act(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            self._done.append(self._awaited)
            action()
