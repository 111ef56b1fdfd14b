"""What a night with work has to import, imported while it would only wait."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def head_start() -> Iterator[None]:
    """Import what tokenizer and model need, several seconds' worth, beside a block that starts Prefect's server.

    The block's own imports come first: two threads that import the same modules may see each other's half made.
    """
    import prefect.server.api.server  # noqa: F401

    thread = threading.Thread(target=_import_libraries, name="head-start")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import_libraries() -> None:
    with suppress(ImportError):  # whoever needs them says so
        from transformers import AutoTokenizer  # noqa: F401

        import engine.engine  # noqa: F401
