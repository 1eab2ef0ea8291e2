"""A person's mistakes in the configuration file, and what the file means when it is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import LocalUpstream, OpenAIUpstream, Settings, load_settings, parse_settings
from atoll.errors import ConfigError


def problems(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, "atoll.yaml", environ)
    return str(caught.value).splitlines()


def test_no_file_means_the_defaults() -> None:
    assert load_settings(None) == Settings()
    assert parse_settings("# nothing but a comment\n", "atoll.yaml", {}) == Settings()
    assert Settings().server.host == "127.0.0.1"
    assert not Settings().ledger.store_content


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().server.port = 1  # type: ignore[misc]


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "atoll.yaml"
    path.write_text(
        """
server: {port: 9000, api_keys: ["${CLIENT_KEY}"]}
upstreams:
  openai: {kind: openai, base_url: "https://api.openai.com/v1", api_key: "${OPENAI_API_KEY}"}
  own: {kind: local}
candidates:
  - {name: gpt-4o-mini, upstream: openai}
  - {name: small, upstream: own, capabilities: [logprobs], prices: {input: 0, output: 0.5}}
routing: {default_candidate: small}
"""
    )
    settings = load_settings(path, {"CLIENT_KEY": "sk-1", "OPENAI_API_KEY": "sk-2"})
    assert settings.server.port == 9000
    assert [key.get_secret_value() for key in settings.server.api_keys] == ["sk-1"]
    assert isinstance(settings.upstreams["openai"], OpenAIUpstream)
    assert isinstance(settings.upstreams["own"], LocalUpstream)
    assert settings.candidates[1].capabilities == {"logprobs"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "server:\n  prot: 1",
            ["atoll.yaml:2: server.prot: unknown key (did you mean 'port'?)", "Allowed here: host, "],
        ),
        ("servers: {}", ["atoll.yaml:1: servers: unknown key (did you mean 'server'?)"]),
        ("server:\n  port: '8700'", ["atoll.yaml:2: server.port", "integer", "'8700'"]),
        ("server:\n  port: 70000", ["atoll.yaml:2: server.port", "65535", "70000"]),
        ("server:\n  port: 99999999999999999999", ["atoll.yaml:2: server.port"]),
        ("server:\n  drain_s: .inf", ["atoll.yaml:2: server.drain_s", "finite"]),
        ("server: 5", ["atoll.yaml:1: server", "found 5"]),
        ("- 1", ["atoll.yaml:1", "server, data_dir"]),
        ("upstreams:\n  a: {kind: opnai}", ["atoll.yaml:2: upstreams.a", "openai, litellm, local, replay"]),
        ("upstreams:\n  a: {base_url: x}", ["atoll.yaml:2: upstreams.a", "openai, litellm, local, replay"]),
        (
            "upstreams:\n  a:\n    kind: local\n    max_batc: 3",
            ["atoll.yaml:4: upstreams.a.max_batc", "did you mean 'max_batch'", "Allowed here: timeouts, "],
        ),
        ("upstreams:\n  a:\n    kind: openai\n    base_url: ftp://x", ["atoll.yaml:4: upstreams.a.base_url"]),
        ("upstreams:\n  a:\n    kind: openai\n", ["atoll.yaml:2: upstreams.a: the key 'base_url' is missing"]),
        (
            "routing:\n  embedder:\n    kind: stat",
            ["atoll.yaml:3: routing.embedder.kind", "'static' or 'minilm'", "'stat'"],
        ),
        ("server:\n  port: 1\n  port: 2", ["atoll.yaml:3: server.port: stands twice, on line 2 too"]),
        ("server: [", ["atoll.yaml:1: not valid YAML"]),
        ("server: *nobody", ["atoll.yaml:1: not valid YAML", "nobody"]),
        ("server: &me [*me]", ["contains itself"]),
        (
            "server:\n  port: ${PORT}",
            ["atoll.yaml:2: server.port: the environment variable PORT is not set", ":-default"],
        ),
        (
            "upstreams: {own: {kind: local}}\ncandidates:\n  - name: auto\n    upstream: own",
            ["atoll.yaml:3: candidates[0].name", "asks for routing"],
        ),
        (
            "upstreams: {own: {kind: local}}\ncandidates:\n  - name: a\n    upstream: owm",
            ["atoll.yaml:4: candidates[0].upstream: no upstream is called 'owm'", "own"],
        ),
        (
            "upstreams: {u: {kind: local}}\ncandidates: [{name: a, upstream: u},\n {name: a, upstream: u}]",
            ["atoll.yaml:3: candidates[1].name: 'a' is taken by candidates[0]"],
        ),
        (
            "upstreams: {u: {kind: local}}\ncandidates: [{name: a, upstream: u}]\nrouting:\n  default_candidate: b",
            ["atoll.yaml:4: routing.default_candidate: no candidate is called 'b'", "a"],
        ),
        (
            "upstreams: {u: {kind: local}}\ncandidates: [{name: a, upstream: u, is_routable: false}]",
            ["at least one candidate must be routable"],
        ),
    ],
)
def test_a_mistake_names_file_line_key_and_what_is_allowed(text: str, expected: list[str]) -> None:
    message = "\n".join(problems(text))
    for part in expected:
        assert part in message


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    lines = problems("server:\n  port: x\n  hots: y\nledger:\n  enabled: 3\n")
    assert [line.split(": ")[1] for line in lines] == ["server.port", "server.hots", "ledger.enabled"]


def test_the_environment_can_give_numbers_texts_and_defaults() -> None:
    text = """
server:
  port: ${PORT}
  api_keys: ["${KEY}"]
ledger: {enabled: "${LEDGER:-false}"}
data_dir: ${BASE}/atoll$$
"""
    settings = parse_settings(text, "atoll.yaml", {"PORT": "9001", "KEY": "12345", "BASE": "/srv"})
    assert settings.server.port == 9001
    assert settings.server.api_keys[0].get_secret_value() == "12345"
    assert settings.ledger.enabled is False
    assert settings.data_dir == Path("/srv/atoll$")


def test_a_wrong_number_from_the_environment_is_told_with_its_line() -> None:
    assert "atoll.yaml:2: server.port" in problems("server:\n  port: ${PORT}", PORT="soon")[0]


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    text = "upstreams:\n  a: {kind: openai, base_url: 'http://x', api_key: 123456789}"
    assert "123456789" not in "\n".join(problems(text))


def test_secrets_are_not_in_the_settings_repr() -> None:
    settings = parse_settings("server: {api_keys: ['sk-very-secret']}", "atoll.yaml", {})
    assert "sk-very-secret" not in repr(settings)
    assert "sk-very-secret" not in settings.model_dump_json()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_settings(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"server: {host: \xff}")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 15"):
        load_settings(tmp_path / "latin.yaml")


def test_a_date_in_a_model_name_stays_text() -> None:
    text = "upstreams: {u: {kind: local}}\ncandidates: [{name: 2024-08-06, upstream: u}]"
    assert parse_settings(text, "atoll.yaml", {}).candidates[0].name == "2024-08-06"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from([*Settings.model_fields, "kind", "name", "port", "embedder", "x"]), children, max_size=4
        )
    ),
    max_leaves=12,
)


@given(values)
def test_any_yaml_gives_settings_or_our_error(value: object) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    try:
        outcome = repr(parse_settings(text, "atoll.yaml", {}))
    except ConfigError as error:
        outcome = str(error)
    assert outcome.startswith(("atoll.yaml", "Settings("))
