"""Finding stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back what could still become a stop string, and cuts at the first one that is complete.

    One automaton for each stop string (Knuth, Morris and Pratt 1977): constant work for each character, however long
    the stop strings are.

    >>> matcher = StopMatcher(["###"])
    >>> matcher.push("a #"), matcher.push("# b ##"), matcher.push("# c")
    (('a ', False), ('## b ', False), ('', True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failure_links(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """How many first characters of each stop string the text ends with."""
        self._held = ""

    @property
    def held(self) -> str:
        """Text that was pushed and not given out yet."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns what may be given out now and whether a stop string was found (then all is over).

        If several stop strings end at the same character, the longest counts.
        """
        if not self._stops:
            return text, False
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found:
                self._held = ""
                return pending[: end - found], True
        keep = max(self._matched)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut], False

    def flush(self) -> str:
        """The end of the text: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Feed one character; the length of the longest stop string that it completes, or 0."""
        longest = 0
        for index, stop in enumerate(self._stops):
            length, failure = self._matched[index], self._failures[index]
            while length and stop[length] != character:
                length = failure[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                longest = max(longest, length)
                length = failure[length - 1]
            self._matched[index] = length
        return longest


def _failure_links(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    links = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = links[length - 1]
        if pattern[length] == pattern[index]:
            length += 1
        links[index] = length
    return links
