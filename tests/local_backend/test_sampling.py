from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.local_backend.engine import Sampling
from atoll.local_backend.sampling import Draw, draw_tokens, logprobs_of


def draw(choice: int = 0, top_logprobs: int | None = None, **sampling: Any) -> Draw:
    return Draw.for_choice(Sampling(**sampling), choice, top_logprobs)


def drawn_counts(logits: torch.Tensor, rounds: int, **sampling: Any) -> Counter[int]:
    one = draw(**sampling)
    return Counter(draw_tokens(logits[None], [one])[0].token_id for _ in range(rounds))


def test_temperature_zero_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]], dtype=torch.bfloat16)
    assert [drawn.token_id for drawn in draw_tokens(logits, [draw(temperature=0), draw(temperature=1e-6)])] == [1, 0]


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = drawn_counts(probabilities.log(), 4000, seed=1)
    for token_id, probability in enumerate(probabilities.tolist()):
        deviation = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(counts[token_id] / 4000 - probability) < 5 * deviation


def test_temperature_sharpens() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert drawn_counts(logits, 500, seed=1, temperature=0.1)[0] > drawn_counts(logits, 500, seed=1, temperature=2)[0]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, {0}), (0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_draws_from_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn_counts(logits, 800, seed=3, top_p=top_p)) == kept


def test_top_p_of_a_flat_distribution_needs_more_than_the_first_try() -> None:
    logits = torch.zeros(5000)
    drawn = draw_tokens(logits.expand(400, -1), [draw(seed=seed, top_p=0.9) for seed in range(400)])
    assert len({one.token_id for one in drawn}) > 256


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30),
    st.floats(0.01, 2),
    st.floats(0, 1),
    st.integers(0, 1000),
)
@settings(deadline=None)
def test_whatever_is_drawn_is_in_the_nucleus(values: list[float], temperature: float, top_p: float, seed: int) -> None:
    logits = torch.tensor([values])
    token_id = draw_tokens(logits, [draw(temperature=temperature, top_p=top_p, seed=seed)])[0].token_id
    probabilities = torch.softmax(logits[0] / temperature, dim=-1)
    more_likely = probabilities[probabilities > probabilities[token_id]].sum()
    assert more_likely <= top_p + 1e-4


def test_a_draw_does_not_depend_on_its_company() -> None:
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(0)) * 3
    settings_ = [
        {"seed": 1},
        {"seed": 2, "top_p": 0.8},
        {"temperature": 0},
        {"seed": 4, "temperature": 0.3},
        {"seed": 5},
    ]
    together = [drawn.token_id for drawn in draw_tokens(logits, [draw(**one) for one in settings_])]
    alone = [draw_tokens(logits[row : row + 1], [draw(**one)])[0].token_id for row, one in enumerate(settings_)]
    assert together == alone


def test_choices_of_one_seed_differ_and_are_repeatable() -> None:
    logits = torch.zeros(1, 1000)
    first = [draw_tokens(logits, [draw(choice, seed=7)])[0].token_id for choice in range(8)]
    assert first == [draw_tokens(logits, [draw(choice, seed=7)])[0].token_id for choice in range(8)]
    assert len(set(first)) > 4


def test_without_a_seed_answers_differ() -> None:
    logits = torch.zeros(1, 1000)
    assert len({draw_tokens(logits, [draw()])[0].token_id for _ in range(10)}) > 1


def test_a_bias_forces_and_forbids() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert draw_tokens(logits, [draw(temperature=0, logit_bias={0: 100})])[0].token_id == 0
    assert draw_tokens(logits, [draw(temperature=0, logit_bias={2: -100})])[0].token_id == 1


def test_penalties_count_what_was_drawn() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0]])
    frequency = draw(temperature=0, frequency_penalty=0.6)
    assert [draw_tokens(logits, [frequency])[0].token_id for _ in range(4)] == [0, 0, 1, 0]
    presence = draw(temperature=0, presence_penalty=1.5)
    assert [draw_tokens(logits, [presence])[0].token_id for _ in range(3)] == [0, 1, 0]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]).log()
    scored, plain = draw_tokens(logits, [draw(top_logprobs=2, temperature=0, logit_bias={1: 100}), draw(temperature=0)])
    assert scored.token_id == 1
    assert scored.logprob == pytest.approx(math.log(0.3))
    assert [token_id for token_id, _ in scored.top] == [0, 1]
    assert math.exp(scored.top[0][1]) == pytest.approx(0.6)
    assert plain.logprob is None


def test_all_probabilities_sum_up_to_one() -> None:
    logits = torch.randn(3, 50)
    for drawn in logprobs_of(logits, [1, 2, 3], top_logprobs=50):
        assert sum(math.exp(logprob) for _, logprob in drawn.top) == pytest.approx(1, abs=1e-5)
        assert dict(drawn.top)[drawn.token_id] == pytest.approx(drawn.logprob)
