"""Ridge regression with exact leave-one-out predictions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.routers.ridge import fit_ridge


def brute_force(features: np.ndarray, targets: np.ndarray, penalty: float) -> np.ndarray:
    """Predict each row by a ridge regression on all others, around the others' means."""
    predictions = np.empty_like(targets)
    for row in range(len(features)):
        others = np.arange(len(features)) != row
        mean, target_mean = features.mean(axis=0), targets.mean(axis=0)
        x, y = features[others] - mean, targets[others] - target_mean
        # The intercept is not penalised: a column of ones beside centred features.
        x1 = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        penalties = np.diag([penalty] * x.shape[1] + [0.0])
        weights = np.linalg.solve(x1.T @ x1 + penalties, x1.T @ y)
        predictions[row] = np.append(features[row] - mean, 1.0) @ weights + target_mean
    return predictions


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(8, 30), p=st.integers(1, 5), log_penalty=st.floats(-2, 3))
def test_left_out_predictions_are_those_of_a_fit_without_the_row(seed: int, n: int, p: int, log_penalty: float) -> None:
    rng = np.random.default_rng(seed)
    features, targets = rng.standard_normal((n, p)), rng.standard_normal((n, 2))
    penalty = 10.0**log_penalty
    ridge = fit_ridge(features, targets, np.array([penalty]))
    np.testing.assert_allclose(ridge.left_out, brute_force(features, targets, penalty), rtol=1e-6, atol=1e-8)


def test_each_target_gets_the_penalty_that_suits_it() -> None:
    """A target that is all signal keeps it; one that is all noise is predicted by its mean."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((200, 20))
    signal = features @ rng.standard_normal((20, 1))
    noise = rng.standard_normal((200, 1))
    ridge = fit_ridge(features, np.concatenate([signal, noise], axis=1))
    predictions = ridge.predict(features)
    assert np.corrcoef(predictions[:, 0], signal[:, 0])[0, 1] > 0.999
    assert predictions[:, 1].std() < 0.1 * noise.std()


def test_features_that_say_nothing_leave_the_mean() -> None:
    ridge = fit_ridge(np.ones((10, 3)), np.arange(10.0)[:, None])
    np.testing.assert_allclose(ridge.predict(np.ones((2, 3))), 4.5, atol=1e-3)
