"""Scores of labels of which one begins another, as "1" begins "10"."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def set_apart(scores: npt.NDArray[np.float64], labels: Sequence[tuple[int, ...]]) -> npt.NDArray[np.float64]:
    """Takes from the probability of a label that of the longer labels which begin with it.

    The teacher-forced probability of "1" is that of all answers that begin with it, "10" among them: without this, the
    longer label could never be the most probable one.

    Args:
        scores: natural-log probability of each label, up to a constant; the result has the same constant.
        labels: token ids of each.
    """
    places = {label: place for place, label in enumerate(labels)}
    longer: dict[int, list[float]] = {}
    for label, place in places.items():
        shorter = (places[label[:end]] for end in range(len(label) - 1, 0, -1) if label[:end] in places)
        if (parent := next(shorter, None)) is not None:
            longer.setdefault(parent, []).append(scores[place])
    apart = scores.copy()
    for place, taken in longer.items():
        share = np.logaddexp.reduce(taken) - scores[place]
        apart[place] += np.log1p(-np.exp(min(share, -1e-12)))  # rounding can make the longer ones more probable
    return apart
