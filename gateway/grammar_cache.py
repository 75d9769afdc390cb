"""Grammars that requests have had before: an agent sends the same tools every turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from threading import Lock

MAX_KEPT_CHARACTERS = 16 << 20


class KnownGrammars:
    """The last used ones, by all that they are made of. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._texts: dict[bytes, str] = {}
        self._characters = 0

    def grammar(self, made_of: object, make: Callable[[], str]) -> str:
        """What `make` makes of something that JSON can tell apart. Raises what that raises, each time anew."""
        key = blake2b(json.dumps(made_of).encode(), digest_size=16).digest()
        with self._lock:
            text = self._texts.pop(key, None)
            if text is not None:
                self._texts[key] = text
                return text
        text = make()
        with self._lock:
            self._characters += len(text) - len(self._texts.pop(key, ""))
            self._texts[key] = text
            while self._characters > MAX_KEPT_CHARACTERS:
                self._characters -= len(self._texts.pop(next(iter(self._texts))))
        return text
