"""What workloads that are answered together may not have in common."""

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from tasks.nights.check_steps import check_tables
from tasks.workloads.workload import load_workload


def test_workloads_have_names_of_their_own() -> None:
    snippets, ranking = load_workload("snippets"), load_workload("ranking")
    check_tables([snippets, ranking])
    with pytest.raises(ConfigError, match=r"workloads snippets and ranking are both called 'Snippets': each .* name"):
        check_tables([snippets, replace(ranking, name="Snippets")])
