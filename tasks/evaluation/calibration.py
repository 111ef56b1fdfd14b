"""Calibrates probabilities by gold rows: scikit-learn fits a monotone map for each, and a view applies the maps."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import ConfigError, DatabaseError
from tasks.database.connection import connect, transaction
from tasks.evaluation.compared_column import ComparedColumn
from tasks.evaluation.evaluation import Comparison
from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

Method = Literal["auto", "isotonic", "platt"]

FEWEST_ROWS = 50
"""Fewest gold rows with an answer from which a map is fitted."""

FEWEST_ISOTONIC_ROWS = 1000
"""With at least this many rows, "auto" is isotonic; with fewer an isotonic map overfits, a logistic curve does not."""

OWN_COLUMNS = ("column_name", "label", "probability", "calibrated_probability")
"""Of the views that apply maps."""

NUM_FOLDS = 5
LEAST_PROBABILITY = 1e-6
"""Probabilities are clipped to this distance from 0 and 1, here and in the view, so that logits are finite."""

NO_PENALTY = 1e9
"""Inverse strength of a penalty that has no effect."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A map from probabilities to calibrated ones; a row of the table ``calibrations``, without the model's name."""

    model: str = ""
    model_digest: str = ""
    column_name: str = ""
    label: str | None = None
    method: str
    num_rows: int
    brier_before: float = math.nan
    brier_after: float = math.nan
    slope: float | None = None
    intercept: float | None = None
    thresholds: tuple[float, ...] | None = None
    calibrated: tuple[float, ...] | None = None

    def apply(self, probabilities: Values) -> Values:
        """The calibrated probabilities, as the view computes them."""
        if self.thresholds is not None and self.calibrated is not None:
            return np.interp(probabilities, self.thresholds, self.calibrated)
        assert self.slope is not None
        assert self.intercept is not None
        return 1 / (1 + np.exp(-(self.slope * _logit(probabilities) + self.intercept)))


@task(name="calibrate", retries=0, cache_policy=NO_CACHE, persist_result=False)
def calibrate_answers(
    database: str | Path, workload: Workload, gold: str, method: Method, *, lock_timeout_seconds: float = 30.0
) -> list[Calibration]:
    """Fit a map for each probability that gold covers and each model that gave newest answers, and keep the maps with
    the digests of workload and model. A probability that cannot be calibrated is a warning, if others can.

    The view ``calibrated_<table>`` applies the maps to the newest answers; ``calibrated_<table>_labels`` does so for
    each label, where labels have probabilities.

    Args:
        gold: table or view; see `tasks.evaluation.evaluation.evaluate_answers`.
        method: "platt" is a logistic curve over logits, "isotonic" a piecewise linear, rising function.
        lock_timeout_seconds: to wait while another process has the database open.
    Raises:
        DatabaseError: a key has the name of a column of the views, or gold cannot be used for any probability.
        ConfigError: scikit-learn is not installed.
    """
    if taken := [key for key in workload.key if key.lower() in OWN_COLUMNS]:
        raise DatabaseError(
            f"workload {workload.name!r} has a key {taken[0]!r}, which is also a column of the views of calibrated"
            " probabilities: give the key another name"
        )
    with connect(database, lock_timeout_seconds=lock_timeout_seconds) as connection, transaction(connection):
        comparison = Comparison(connection, workload, "")
        comparison.take_answers(None)
        columns = [column for column in comparison.read_gold(gold) if _probability_of(column)]
        if not columns:
            raise DatabaseError(f"gold table {gold!r} judges no column that has probabilities")
        for name in ("probability_entries_of", "likeliest_entries_of", "calibrated_probability_of"):
            comparison.execute(f"calibrate/macro_{name}")
        of_workload = {"workload_digest": workload.digest}
        models = comparison.execute("calibrate/newest_models", of_workload).fetchall()
        if not models:
            raise DatabaseError(f"workload {workload.name!r} as it is now has answered nothing yet")
        fitted = [
            each
            for model in models
            for column in columns
            for each in _fit_column(comparison, column, workload.digest, model, method)
        ]
        found = [each for each in fitted if isinstance(each, Calibration)]
        refused = [each for each in fitted if isinstance(each, str)]
        if not found:
            raise DatabaseError(f"gold table {gold!r}, {'; '.join(refused)}")
        for reason in refused:
            LOGGER.warning("%s: not calibrated: %s", workload.name, reason)
        for each in (each for each in found if each.brier_after > each.brier_before):
            label = f" of {each.label!r}" if each.label is not None else ""
            line = "%s: %s%s is better as it is: in five folds the error is %.4f, and %.4f with the map"
            LOGGER.warning(line, workload.name, each.column_name, label, each.brier_before, each.brier_after)
        comparison.execute("calibrate/create_calibrations")
        for model_digest in {each.model_digest for each in found}:
            comparison.execute("calibrate/delete_calibrations", of_workload | {"model_digest": model_digest})
        row = {"workload": workload.name, **of_workload, "gold": gold, "created_at": datetime.now(UTC)}
        for each in found:
            values = row | asdict(each)
            del values["model"]
            comparison.execute("write/insert_rows", {"rows": [values]}, table="calibrations")
        _create_views(comparison, workload, columns, str(database))
    return found


def fit(probabilities: Values, is_right: Values, method: Method) -> Calibration:
    """The map of one probability.

    Args:
        probabilities: 0 to 1.
        is_right: 1.0 if the event of the probability occurred, else 0.0.
        method: see `calibrate_answers`.
    Raises:
        ValueError: there are too few rows, the event hardly ever or nearly always occurred, or larger probabilities
            are not right more often.
    """
    if len(probabilities) < FEWEST_ROWS:
        answered = f"{len(probabilities)} rows that this workload and model answered"
        raise ValueError(f"{answered}; a calibration needs at least {FEWEST_ROWS}")
    num_right, num_wrong = np.count_nonzero(is_right), np.count_nonzero(is_right == 0)
    if min(num_right, num_wrong) < NUM_FOLDS:
        raise ValueError(f"{num_right} rows are right and {num_wrong} wrong; a calibration needs {NUM_FOLDS} of each")
    above_least = _logit(probabilities) - _logit(probabilities).min()
    if above_least[is_right == 1].mean() <= above_least[is_right == 0].mean():
        raise ValueError("larger probabilities are not right more often; calibration cannot correct that")
    if method == "auto":
        method = "isotonic" if len(probabilities) >= FEWEST_ISOTONIC_ROWS else "platt"
    fitted = _fit(probabilities, is_right, method)
    shuffled = np.random.default_rng(0).permutation(len(probabilities))
    by_outcome = shuffled[np.argsort(is_right[shuffled], kind="stable")]  # each fold has its share of both
    after = np.empty(len(probabilities))
    for fold in range(NUM_FOLDS):
        inside, others = by_outcome[fold::NUM_FOLDS], np.delete(by_outcome, np.s_[fold::NUM_FOLDS])
        after[inside] = _fit(probabilities[others], is_right[others], method).apply(probabilities[inside])
    return replace(
        fitted,
        brier_before=float(((probabilities - is_right) ** 2).mean()),
        brier_after=float(((after - is_right) ** 2).mean()),
    )


def _fit(probabilities: Values, is_right: Values, method: str) -> Calibration:
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ConfigError("calibrate needs scikit-learn: pip install '.[evaluate]' in batchloom's checkout") from error
    make = partial(Calibration, method=method, num_rows=len(probabilities))
    if method == "isotonic":
        curve = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(probabilities, is_right)
        return make(thresholds=tuple(curve.X_thresholds_.tolist()), calibrated=tuple(curve.y_thresholds_.tolist()))
    # Platt's targets: few rows of one outcome would make a step of the curve (Probabilistic Outputs for SVMs, 1999).
    num_right, num_wrong = is_right.sum(), (1 - is_right).sum()
    targets = np.where(is_right == 1, (num_right + 1) / (num_right + 2), 1 / (num_wrong + 2))
    logits, weights = np.tile(_logit(probabilities), 2)[:, None], np.concatenate([targets, 1 - targets])
    outcomes = np.repeat([1, 0], len(targets))
    line = LogisticRegression(C=NO_PENALTY, max_iter=1000).fit(logits, outcomes, sample_weight=weights)
    return make(slope=float(line.coef_[0, 0]), intercept=float(line.intercept_[0]))


def _fit_column(
    comparison: Comparison, column: ComparedColumn, workload_digest: str, of_model: tuple[str, str], method: Method
) -> list[Calibration | str]:
    """The map for the column, or one for each label; a text says why the column, or which of its labels, have none.
    `of_model` is the name and the digest of the model whose answers count."""
    name, (model, model_digest) = _probability_of(column), of_model
    digests = {"workload_digest": workload_digest, "model_digest": model_digest}
    parameters = digests | {"true_label": column.true_label}
    names = {"expected": column.expected, "answer": column.name, "probability": name}
    rows = comparison.execute("calibrate/points", parameters, **names).fetchall()
    labels: Sequence[str | None] = sorted({label for label, _, _ in rows}) or [None]
    found, refused = list[Calibration | str](), dict[str, list[str | None]]()
    for label in labels:
        values = np.array([row[1:] for row in rows if row[0] == label], dtype=float).reshape(-1, 2)
        try:
            fitted = fit(values[:, 0], values[:, 1], method)
            found.append(replace(fitted, model=model, model_digest=model_digest, column_name=name, label=label))
        except ValueError as error:
            refused.setdefault(str(error), []).append(label)
    for reason, without in refused.items():
        of_labels = "" if without == [None] else f" of {', '.join(map(repr, without))}"
        found.append(f"{name}{of_labels}: {reason} (answers of {model})")
    return found


def _create_views(comparison: Comparison, workload: Workload, columns: Sequence[ComparedColumn], database: str) -> None:
    table, names = workload.output.table, [_probability_of(column) for column in columns]
    of_labels = [name for name in names if name.endswith("_probabilities")]
    views = {f"calibrated_{table}": ("likeliest_entries_of", names)}
    if of_labels:
        views[f"calibrated_{table}_labels"] = ("probability_entries_of", of_labels)
    comparison.check_views(dict.fromkeys(views, ("column_name", "calibrated_probability")), database)
    for view, (entries_of, shown) in views.items():
        comparison.execute(
            "calibrate/create_view", view=view, latest=f"latest_{table}", keys=workload.key, columns=shown,
            entries_of=entries_of,
        )  # fmt: skip


def _probability_of(column: ComparedColumn) -> str:
    """The name of the answers' column that is calibrated; empty for none."""
    if column.kind == "probability":
        return column.name
    return column.probability if column.probability.endswith(("_probability", "_probabilities")) else ""


def _logit(probabilities: Values) -> Values:
    inside = np.clip(probabilities, LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    logits: Values = np.log(inside / (1 - inside))
    return logits
