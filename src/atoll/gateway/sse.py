"""Server-sent events, cut from bytes (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import re
from typing import Final

from atoll.errors import UpstreamMalformed

# A line ends with CRLF, LF or CR, and an event with an empty line. A CR that nothing follows yet may be half of a CRLF:
# what comes next decides.
_END: Final = re.compile(rb"(?:\r\n|\n|\r(?![\n]|\Z))(?:\r\n|\n|\r(?![\n]|\Z))")
_LONGEST_END_BYTES: Final = 4


class EventSplitter:
    """Bytes in, whole events out, wherever the bytes were cut.

    The events and `rest` joined are the bytes that were fed; no byte is decoded, changed or dropped.
    """

    __slots__ = ("_buffer", "_max_event_bytes")

    def __init__(self, max_event_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_event_bytes = max_event_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each with the empty line that ends it.

        Raises UpstreamMalformed when an unfinished event is larger than allowed.
        """
        buffer = self._buffer
        if not buffer and data.endswith(b"\n\n") and b"\r" not in data:
            # As nearly all servers send: whole events, LF only.
            return [event + b"\n\n" for event in data[:-2].split(b"\n\n")] if data.count(b"\n\n") > 1 else [data]
        # What was searched before holds no end; one may have begun in its last bytes.
        search_from = max(len(buffer) - _LONGEST_END_BYTES, 0)
        buffer += data
        events: list[bytes] = []
        start = 0
        for end in _END.finditer(buffer, search_from):
            events.append(bytes(buffer[start : end.end()]))
            start = end.end()
        if start:
            del buffer[:start]
        if len(buffer) > self._max_event_bytes:
            raise UpstreamMalformed(
                f"The upstream sent an event of more than {self._max_event_bytes} bytes; that is more than is allowed"
            )
        return events

    def rest(self) -> bytes:
        """What came after the last whole event."""
        return bytes(self._buffer)
