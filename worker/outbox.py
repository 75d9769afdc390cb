"""What gateways are sent, and when: what nobody waits for goes out once the device has something to do."""

from __future__ import annotations

from collections.abc import Callable

from protocol.messages import Accepted, Message


class Outbox:
    """Messages leave in their order. Where it `holds`, `Accepted` waits for `flush`, or for what is sent next.

    To say that a request was let in takes some of the time until its first pass is started, and what is done on a
    device of its own hides it.
    """

    def __init__(self, send: Callable[[bytes, Message], None], holds: bool = False) -> None:
        self._send = send
        self._holds = holds
        self._held: list[tuple[bytes, Message]] = []

    def send(self, sender: bytes, message: Message) -> None:
        """Send to a gateway."""
        if self._holds and isinstance(message, Accepted):
            self._held.append((sender, message))
            return
        self.flush()
        self._send(sender, message)

    def flush(self) -> None:
        """Send what has been held."""
        held, self._held = self._held, []
        for sender, message in held:
            self._send(sender, message)
