"""Child processes run our modules, wherever they are started."""

from pathlib import Path

import pytest

from engine.child_process import start_child


def test_folders_of_the_working_directory_do_not_hide_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine", "tasks", "sql"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)

    ours, process = start_child("tasks.workers.worker_process")
    ours.close()  # a child that could be imported ends with its parent

    assert process.wait(timeout=60) == 0
