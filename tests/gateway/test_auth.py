from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from atoll.config import ServerSettings
from atoll.errors import ConfigError, NotAuthenticated, NotPermitted
from atoll.gateway.auth import HostCheck, KeyRing, check_exposure

KEY = "atoll-secret-key-1"


def test_a_known_key_has_a_label_that_does_not_show_it() -> None:
    ring = KeyRing([KEY, "another-key"])
    label = ring.authenticate({b"authorization": b"Bearer " + KEY.encode()})
    assert label is not None
    assert KEY not in label
    assert label.removeprefix("key-") not in hashlib.sha256(KEY.encode()).hexdigest()
    assert label == KeyRing([KEY]).authenticate({b"authorization": b"bearer  " + KEY.encode() + b" "})
    assert label != ring.authenticate({b"authorization": b"Bearer another-key"})


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer ' OR '1'='1",
        b"Bearer atoll-secret-key-1\x00",
        b"Bearer atoll-secret-key-1\nx",
        b"Bearer " + b"x" * 1_000_000,
        b"Bearer \xff\xfe",
        b"Bearer",
        b"Bearer ",
        b"Basic " + KEY.encode(),
        KEY.encode(),
        b"Bearer " + hashlib.sha256(KEY.encode()).hexdigest().encode(),
        b"",
    ],
)
def test_anything_odd_is_401(value: bytes) -> None:
    with pytest.raises(NotAuthenticated) as raised:
        KeyRing([KEY]).authenticate({b"authorization": value})
    assert KEY not in raised.value.message


@given(value=st.binary(max_size=60))
def test_no_bytes_open_the_door_by_accident(value: bytes) -> None:
    with pytest.raises(NotAuthenticated):
        KeyRing([KEY]).authenticate({b"authorization": b"Bearer " + value})


def test_without_keys_everybody_may_call() -> None:
    assert KeyRing([]).authenticate({}) is None


@pytest.mark.parametrize("host", [b"localhost", b"localhost:8700", b"127.0.0.1:1", b"[::1]:8700", b"LOCALHOST:9"])
def test_this_machines_own_names_are_accepted(host: bytes) -> None:
    HostCheck(ServerSettings()).check(host)


@pytest.mark.parametrize(
    "host", [b"evil.example", b"localhost.evil.example:8700", b"", None, b"127.0.0.1.evil.example"]
)
def test_a_page_that_points_its_own_name_at_this_machine_is_refused(host: bytes | None) -> None:
    with pytest.raises(NotPermitted):
        HostCheck(ServerSettings()).check(host)


def test_more_names_can_be_allowed() -> None:
    check = HostCheck(ServerSettings(allowed_hosts=("gateway.lan",)))
    check.check(b"gateway.lan:8700")
    check.check(b"localhost")
    with pytest.raises(NotPermitted):
        check.check(b"other.lan")


def test_a_public_address_takes_any_name_unless_some_are_listed() -> None:
    HostCheck(ServerSettings(host="0.0.0.0")).check(b"api.example")
    with pytest.raises(NotPermitted):
        HostCheck(ServerSettings(host="0.0.0.0", allowed_hosts=("api.example",))).check(b"evil.example")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "gateway.lan"])
def test_a_server_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys"):
        check_exposure(ServerSettings(host=host))
    check_exposure(ServerSettings(host=host, api_keys=(SecretStr(KEY),)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(ServerSettings(host=host))
