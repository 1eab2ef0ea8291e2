from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import LedgerSettings
from atoll.gateway.ledger import LedgerRow
from atoll.gateway.ledger.encode import ROW_FIELDS, RowEncoder, from_json_line, to_json_line
from atoll.gateway.ledger.tables import REQUESTS

any_value = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=20),
    st.text(st.characters(exclude_categories=())),
)


def test_tables_and_rows_have_the_same_columns() -> None:
    assert {column.name for column in REQUESTS.columns} == {*ROW_FIELDS, "seq"}


@given(st.dictionaries(st.sampled_from(ROW_FIELDS), any_value))
def test_whatever_stands_in_a_row_survives_the_spill_file(values: dict[str, Any]) -> None:
    row = LedgerRow("req_1", 1.0, "/v1/chat/completions")
    for name, value in values.items():
        setattr(row, name, value)
    encoded = RowEncoder(LedgerSettings(store_content=True)).encode(row)
    assert from_json_line(to_json_line(encoded)) == encoded
    for column in REQUESTS.columns:
        assert column.name == "seq" or column.nullable or encoded[column.name] is not None


@given(st.binary(max_size=200))
def test_torn_lines_are_told(line: bytes) -> None:
    assert from_json_line(line) is None


def test_a_line_of_another_version_fills_what_it_lacks() -> None:
    values = from_json_line(b'{"request_id":"req_1","column_of_tomorrow":1}')
    assert values is not None
    assert values["status"] == 0
    assert values["endpoint"] == ""
    assert values["cost_usd"] is None
    assert set(values) == set(ROW_FIELDS)


def test_content_is_kept_only_where_it_is_switched_on() -> None:
    row = LedgerRow("req_1", 1.0, "/v1/chat/completions", prompt_json="secret plans", answer_text="indeed")
    assert RowEncoder(LedgerSettings()).encode(row)["prompt_json"] is None
    assert RowEncoder(LedgerSettings()).encode(row)["answer_text"] is None
    assert RowEncoder(LedgerSettings(store_content=True)).encode(row)["prompt_json"] == "secret plans"


@pytest.mark.parametrize("name", [name for name in ROW_FIELDS if str(REQUESTS.c[name].type) == "TEXT"])
def test_every_text_is_bounded(name: str) -> None:
    """GW-70: messages were cut, and the error that quoted them was not."""
    row = LedgerRow("req_1", 1.0, "/v1/chat/completions")
    setattr(row, name, "word " * 1_000_000)
    settings = LedgerSettings(store_content=True, max_text_chars=100, max_content_chars=300)
    limit = 300 if name in ("prompt_json", "answer_text", "decision_json") else 100
    assert 0 < len(RowEncoder(settings).encode(row)[name]) <= limit


def test_a_decision_over_the_limit_is_still_json() -> None:
    decision = {"candidate": "m7", "estimates": [{"candidate": f"m{n}", "quality": 0.5} for n in range(500)]}
    row = LedgerRow("req_1", 1.0, "/v1/chat/completions", decision_json=json.dumps(decision))
    kept = RowEncoder(LedgerSettings(max_content_chars=1000)).encode(row)["decision_json"]
    assert json.loads(kept) == {"candidate": "m7", "is_cut": True}
