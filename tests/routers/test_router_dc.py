"""What is RouterDC's own: its two losses, the checkpoint, and costs that only the preference brings in."""

from __future__ import annotations

import numpy as np
import torch

from atoll.routers.checks import POOL, SPACE, fitted, probe, world
from atoll.routers.router_dc import RouterDCRouter, sample_llm_loss, sample_sample_loss

NAN = float("nan")


def llm_loss(logits: list[float], quality: list[float], k: int = 3) -> float:
    generator = torch.Generator().manual_seed(0)
    return float(sample_llm_loss(torch.tensor([logits]), torch.tensor([quality]), k, k, generator))


def test_a_positive_is_set_against_the_worst() -> None:
    """One of four is right: -log softmax of it against the three others."""
    expected = -np.log(np.exp(1.0) / (np.exp(1.0) + 2 * np.exp(0.5) + 1.0))
    assert np.isclose(llm_loss([1.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]), expected)


def test_only_the_worst_are_negatives() -> None:
    two = llm_loss([1.0, 9.0, 0.5, 0.0], [0.9, 0.5, 0.2, 0.1], k=1)
    assert np.isclose(two, -np.log(np.exp(1.0) / (np.exp(1.0) + 1.0)))


def test_equal_models_and_unknown_ones_teach_nothing() -> None:
    assert llm_loss([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == 0.0
    assert llm_loss([1.0, 2.0, 3.0], [NAN, NAN, 0.0]) == 0.0
    assert np.isclose(llm_loss([1.0, 0.0, 7.0], [1.0, 0.0, NAN]), llm_loss([1.0, 0.0], [1.0, 0.0]))


def test_soft_scores_teach_as_binary_ones_do() -> None:
    """No absolute limit: everything lies below 0.5 here."""
    assert np.isclose(llm_loss([1.0, 0.0], [0.3, 0.1]), llm_loss([1.0, 0.0], [1.0, 0.0]))


def test_prompts_of_one_cluster_are_drawn_together() -> None:
    similarity = torch.tensor([[1.0, 0.8, 0.1], [0.8, 1.0, 0.1], [0.1, 0.1, 1.0]])
    loss = sample_sample_loss(similarity, torch.tensor([0, 0, 1]), 3, torch.Generator().manual_seed(0))
    assert np.isclose(float(loss), -np.log(np.exp(0.8) / (np.exp(0.8) + np.exp(0.1))))


def test_one_cluster_or_one_prompt_has_no_contrast() -> None:
    generator = torch.Generator().manual_seed(0)
    assert float(sample_sample_loss(torch.ones(3, 3), torch.tensor([0, 0, 0]), 3, generator)) == 0.0
    assert float(sample_sample_loss(torch.ones(1, 1), torch.tensor([0]), 3, generator)) == 0.0


def test_the_checkpoint_is_the_best_on_the_validation_part() -> None:
    """Steps so large that training diverges from what it began with: an early checkpoint is kept, not the last."""
    outcomes, vectors = world()
    router = RouterDCRouter(steps=300, learning_rate=1.0).fit(outcomes, vectors, POOL, space=SPACE)
    assert router.best_step_ < 300
    last = RouterDCRouter(steps=300, validation_share=0.0).fit(outcomes, vectors, POOL, space=SPACE)
    assert last.best_step_ == 300


def test_costs_change_scores_only_below_a_preference_of_one() -> None:
    router = fitted(lambda: RouterDCRouter(steps=100))
    vectors, prompt_tokens = probe()
    np.testing.assert_allclose(
        router.score(vectors, prompt_tokens, 1.0), router.score(vectors, prompt_tokens * 50, 1.0)
    )
    cheapest = router.estimate(vectors, prompt_tokens).cost_usd.argmin(axis=1)
    np.testing.assert_array_equal(router.score(vectors, prompt_tokens, 0.0).argmax(axis=1), cheapest)


def test_training_leaves_randomness_and_threads_alone() -> None:
    torch.manual_seed(7)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    fitted(lambda: RouterDCRouter(steps=10))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
