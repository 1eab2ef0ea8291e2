from __future__ import annotations

from atoll.gateway.sessions import Sessions


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_is_known_until_it_was_silent_for_too_long() -> None:
    clock = Clock()
    sessions = Sessions(10.0, 5, clock)
    sessions.note("key", "talk", "gpt", 120)
    clock.now = 9.0
    found = sessions.get("key", "talk")
    assert found is not None
    assert (found.candidate, found.prompt_tokens) == ("gpt", 120)
    clock.now = 20.0
    assert sessions.get("key", "talk") is None


def test_another_key_has_other_sessions() -> None:
    sessions = Sessions(10.0, 5)
    sessions.note("key-1", "talk", "gpt", 1)
    assert sessions.get("key-2", "talk") is None
    assert sessions.get(None, "talk") is None
    assert sessions.get("key-1", None) is None


def test_the_longest_unheard_of_goes_first_when_there_are_too_many() -> None:
    sessions = Sessions(1000.0, 2)
    for name in ("a", "b", "a", "c"):
        sessions.note(None, name, "gpt", 1)
    assert len(sessions) == 2
    assert sessions.get(None, "b") is None
    assert sessions.get(None, "a") is not None


def test_what_has_expired_is_dropped_and_not_only_hidden() -> None:
    clock = Clock()
    sessions = Sessions(10.0, 100, clock)
    for name in range(50):
        sessions.note(None, str(name), "gpt", 1)
    clock.now = 11.0
    sessions.note(None, "new", "gpt", 1)
    assert len(sessions) == 1
