"""Child processes run our modules, wherever they are started."""

import os
import subprocess
import sys
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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two cores")
@pytest.mark.parametrize("binding", ["OMP_PROC_BIND=true", "OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-63"])
def test_children_may_use_all_cores_also_where_openmp_binds_this_thread_to_one(tmp_path: Path, binding: str) -> None:
    """OpenMP would bind the threads of each child to the same cores, too."""
    (tmp_path / "child.py").write_text(
        "import os, socket, sys\n"
        "import engine, torch\n"
        "socket.socket(fileno=int(sys.argv[1])).sendall(bytes([len(os.sched_getaffinity(0))]))\n"
    )
    program = (
        "import os\n"
        "from engine.child_process import start_child\n"
        "from engine.cores import usable_threads\n"
        "import torch\n"
        "num_own = len(os.sched_getaffinity(0))\n"
        "line, process = start_child('child')\n"
        "assert num_own == len(os.sched_getaffinity(0))\n"
        "print(num_own, usable_threads(9999), line.recv(1)[0])\n"
    )
    name, value = binding.split("=")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, name: value},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    num_cores = len(os.sched_getaffinity(0))
    assert done.stdout.split() == ["1", str(num_cores), str(num_cores)], done.stderr
