"""The copy of the database for readers, at the end of a night."""

import logging
from pathlib import Path

from tasks.publish import publish

LOGGER = logging.getLogger("batchloom")


def publish_night(database: Path, target: Path, *, is_lenient: bool = False) -> None:
    """Renew the copy for readers. What goes wrong is raised, or only logged where the night has failed already."""
    state = publish(str(database), str(target), return_state=True)
    if state.is_completed() or not is_lenient:
        LOGGER.info("published: %s, %s bytes", target, f"{state.result():,}")
    else:
        LOGGER.warning("%s is not renewed: %s", target, state.message)
