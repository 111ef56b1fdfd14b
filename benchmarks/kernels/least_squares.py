"""The fit that turns measured times into costs."""

import numpy as np


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with no negative coefficient (Lawson and Hanson's active sets)."""
    found = np.zeros(matrix.shape[1])
    is_free = np.zeros(matrix.shape[1], dtype=bool)
    while True:
        gradient = matrix.T @ (target - matrix @ found)
        gradient[is_free] = -np.inf
        if gradient.max() <= 1e-9 * np.abs(matrix.T @ target).max():
            return found
        is_free[gradient.argmax()] = True
        while True:
            trial = np.zeros_like(found)
            trial[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
            if (trial[is_free] > 0).all():
                found = trial
                break
            falling = is_free & (trial <= 0)
            step = (found[falling] / (found[falling] - trial[falling])).min()
            found = found + step * (trial - found)
            is_free &= found > 1e-12
