"""Log messages of native code, as records of :mod:`logging`."""

from __future__ import annotations

import logging

#: The name below which native code logs.
ROOT = "snowskin"

logging.getLogger(ROOT).addHandler(logging.NullHandler())
logging.addLevelName(5, "TRACE")


def level() -> int:
    """The level from which on messages are wanted."""
    if logging.root.manager.disable >= logging.CRITICAL:
        return logging.CRITICAL + 1
    return logging.getLogger(ROOT).getEffectiveLevel()


def deliver(rows: list[tuple[int, str, str, str, int, str, float]], lost: int) -> None:
    """Hands messages to their loggers. Called by native code, on a thread of its own."""
    for levelno, target, text, path, line, thread, created in rows:
        logger = logging.getLogger(f"{ROOT}.{target}")
        if not logger.isEnabledFor(levelno):
            continue
        record = logger.makeRecord(logger.name, levelno, path, line, text, (), None, func=target)
        # When and where it was logged, not when and where it is handled.
        record.created = created
        record.msecs = (created - int(created)) * 1000.0
        record.threadName = thread
        logger.handle(record)
    if lost:
        logging.getLogger(ROOT).warning(
            "%d log messages were dropped: they came faster than they were handled", lost
        )
