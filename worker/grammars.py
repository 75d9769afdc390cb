"""The grammars of requests, each compiled once, beside the engine's thread, and kept for those that bring it again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from protocol.messages import Vocabulary
from worker.grammar import Compiler, Constraint, GrammarError

MAX_KEPT = 32
MAX_KEPT_CHARACTERS = 8 << 20  # of all that are kept: what they are compiled to grows with them

Source = Literal["kept", "compiled", "refused"]


class Grammars:
    """Knows the vocabulary of its model once a gateway has told it. Everything but compiling belongs to one thread."""

    def __init__(
        self,
        vocab_size: int,
        count: Callable[[Source], None] = lambda source: None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`count` is told where the grammar of each request came from.

        `wake` is called, on another thread, whenever one has been compiled. Without it that is done at once.
        """
        self._vocab_size = vocab_size
        self._count, self._wake = count, wake
        self._vocabulary: Vocabulary | None = None
        self._compiler: Compiler | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: dict[str, Future[Constraint]] = {}  # the last used last

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the tokens' bytes; nothing is done with them until a grammar comes."""
        if vocabulary != self._vocabulary:
            self._vocabulary, self._compiler = vocabulary, Compiler(self._vocab_size, vocabulary)
            self._kept.clear()

    def ask(self, grammar: str) -> Future[Constraint]:
        """The start of any answer that follows a grammar: there now, or soon. It may fail with a `GrammarError`."""
        found = self._kept.pop(grammar, None)
        if found is not None:
            self._count("kept")
        else:
            found = self._compiled(grammar)
        self._kept[grammar] = found
        while len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_CHARACTERS:
            del self._kept[next(iter(self._kept))]
        return found

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: str) -> Future[Constraint]:
        compiler = self._compiler

        def work() -> Constraint:
            if compiler is None:
                raise GrammarError("no vocabulary has been told")
            return compiler.constraint(grammar)

        if self._wake is None:
            done = Future[Constraint]()
            try:
                done.set_result(work())
            except GrammarError as error:
                done.set_exception(error)
        else:
            done = self._thread.submit(work)
        done.add_done_callback(self._ended)
        return done

    def _ended(self, done: Future[Constraint]) -> None:
        if not done.cancelled():
            self._count("compiled" if done.exception() is None else "refused")
            if self._wake is not None:
                self._wake()
