"""What code computes a model here, so that results of other code are not taken for its own."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

KINDS = ("*.py", "*.h", "*.cpp", "*.json")


@cache
def code_versions(*folders: str) -> dict[str, str]:
    """The versions of torch and transformers, and a digest of the engine's source in these of its folders."""
    source = hashlib.sha256()
    for folder in folders:
        for file in sorted(path for kind in KINDS for path in (Path(__file__).parent / folder).rglob(kind)):
            source.update(file.read_bytes())
    return {name: version(name) for name in ("torch", "transformers")} | {"engine": source.hexdigest()[:16]}
