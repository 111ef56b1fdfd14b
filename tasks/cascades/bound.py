"""Finds the probability from which on a small model's answers are kept, by an exact test on rows both models answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedThreshold:
    """The result of the test.

    Attributes:
        threshold: answers of at least this probability are kept; None: no answers are.
        num_allowed: kept answers outside the sample that may differ from the large model's.
        num_acceptable: most differing rows from the threshold on in a sample that passes the test; None if none passes.
        num_disagreed: differing rows from the threshold on in the sample.
    """

    threshold: float | None
    num_allowed: int
    num_acceptable: int | None
    num_disagreed: int


def choose_threshold(
    sample: Sequence[tuple[float, bool]], num_rows: int, target_agreement: float, confidence: float
) -> TestedThreshold:
    """The lowest threshold at which both models agree in at least the target share of the rows outside the sample.

    A disagreement is a row whose answer is kept although the large model's would differ; rows sent to the large model
    are none. With at most `num_allowed` disagreements among all rows, the target is met outside the sample, wherever
    they are. An exact test rejects that there are more: the number of disagreements in a sample without replacement is
    hypergeometric, so this is Clopper and Pearson's bound (Biometrika 1934) for a finite population (Buonaccorsi, The
    American Statistician 1987). It assumes nothing about the rows or the models.

    Thresholds are tested from the highest down, until one does not pass. The number of disagreements only grows on the
    way, so only one wrong threshold can be the first to be accepted, and the error of the whole procedure is that of a
    single test: fixed sequence testing, as in Learn then Test (Angelopoulos et al. 2021).

    Args:
        sample: of a random row each, the first model's probability and whether both models agree.
        target_agreement, confidence: share, and with which probability it is met, 0 to 1.
    """
    num_outside = num_rows - len(sample)
    num_allowed = math.floor((1 - target_agreement) * num_outside + 1e-9)
    most = find_most_disagreements(num_rows, len(sample), num_allowed, 1 - confidence)
    found = TestedThreshold(threshold=None, num_allowed=num_allowed, num_acceptable=most, num_disagreed=0)
    if most is None or not num_outside:
        return found
    differing = sorted((probability for probability, is_same in sample if not is_same), reverse=True)
    threshold = math.nextafter(differing[most], math.inf) if len(differing) > most else 0.0
    if threshold > 1:
        return found
    return replace(found, threshold=threshold, num_disagreed=sum(each >= threshold for each in differing))


def find_most_disagreements(num_rows: int, num_sampled: int, num_allowed: int, error: float) -> int | None:
    """The most disagreements in a sample, drawn without replacement from num_rows, with which the test rejects more
    than `num_allowed` among all rows. None if even a sample without disagreements is not enough.

    Args:
        num_allowed: disagreements among all rows, those of the sample included.
        error: probability with which the rejection may be wrong.
    """
    if num_allowed >= num_rows:
        return num_sampled
    num_bad, total, most = num_allowed + 1, 0.0, None
    for count in range(num_sampled + 1):
        if count <= num_bad and num_sampled - count <= num_rows - num_bad:
            total += math.exp(
                _log_choose(num_bad, count)
                + _log_choose(num_rows - num_bad, num_sampled - count)
                - _log_choose(num_rows, num_sampled)
            )
        if total > error:
            break
        most = count
    return most


def _log_choose(num: int, chosen: int) -> float:
    return math.lgamma(num + 1) - math.lgamma(chosen + 1) - math.lgamma(num - chosen + 1)
