"""What a message to a handler on the scheduler has to look like before the handler sees it.

Dask gives a handler whatever a peer has sent. Where a message comes through a stream, an exception would
end the stream, and the worker with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from distributed.core import error_message

import daskps
from daskps import config
from daskps._spec import CLOSE, HELLO, JOIN, LEFT, OPEN, PAUSED, RENEW, Rules
from daskps.exceptions import DaskpsError, InstallationError, InvalidMessageError

logger = logging.getLogger("daskps")

_MOST_TEXT = 1000
_MOST_WORKERS = 1_000_000
# A poll waits for no longer than 2**31 ms.
_MOST_SECONDS = 2_000_000


class Field(NamedTuple):
    """What is allowed in one field."""

    what: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Field:
        """The same, or nothing."""
        return Field(f"{self.what}, or None", lambda value: value is None or self.allows(value))


def _integer(least: int, most: int) -> Field:
    def allows(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most

    return Field(f"an integer from {least} to {most}", allows)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MOST_TEXT


def _are_rules(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != len(Rules._fields):
        return False
    rules = Rules(*value)
    durations: tuple[Any, ...] = rules[: Rules._fields.index("transport")]
    return (
        all(_is_number(seconds) and 0 <= seconds <= _MOST_SECONDS for seconds in durations)
        and rules.transport in config.TRANSPORTS
        and _SIZE.allows(rules.bucket_bytes)
        and rules.wire_dtype in config.WIRE_DTYPES
        and rules.on_divergence in config.ON_DIVERGENCE
    )


def _are_workers(value: Any) -> bool:
    names = isinstance(value, (list, tuple)) and len(value) <= _MOST_WORKERS
    return names and all(_is_text(name) or _ALIAS.allows(name) for name in value)


def _are_keys(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= _MOST_WORKERS and all(map(_is_text, value))


def _are_resources(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(k) and _is_number(v) for k, v in value.items())


_TEXT = Field(f"a string of 1 to {_MOST_TEXT} characters", _is_text)
_KEYS = Field("a list of keys of tasks", _are_keys)
_TRUTH = Field("true or false", lambda value: isinstance(value, bool))
_COUNT = _integer(1, 2**63 - 1)
_SIZE = _integer(0, 2**63 - 1)
_ALIAS = _integer(-(2**63), 2**63 - 1)
_ORDINAL = _integer(0, 2**32 - 1)

FIELDS: dict[str, dict[str, Field]] = {
    OPEN: {
        "run_id": _TEXT,
        "client": _TEXT,
        "version": _TEXT,
        "n_workers": _COUNT.or_none(),
        "most": _COUNT,
        "rules": Field(f"the settings {', '.join(Rules._fields)}, none over {_MOST_SECONDS} s", _are_rules),
        "workers": Field("a list of addresses, hosts or names of workers", _are_workers).or_none(),
        "resources": Field("numbers by name", _are_resources).or_none(),
    },
    RENEW: {"run_id": _TEXT, "join": _TRUTH},
    CLOSE: {"run_id": _TEXT, "keys": _KEYS},
    PAUSED: {"keys": _KEYS},
    JOIN: {
        "run_id": _TEXT,
        "rank": _ORDINAL,
        "generation": _ORDINAL,
        "capacity": _COUNT,
        "shared_memory": _TRUTH,
    },
    HELLO: {"worker": _TEXT, "process": _TEXT, "version": _TEXT},
    LEFT: {"worker": _TEXT, "run_id": _TEXT, "generation": _ORDINAL},
}
"""Of every message, by operation: all fields that it has."""


def refuse_invalid(operation: str, message: dict) -> None:
    """Check the fields of a message.

    Raises
    ------
    InvalidMessageError
        If one is missing, has a value that is not allowed, or is not known.
    """
    fields = FIELDS[operation]
    if message.keys() != fields.keys():
        raise InvalidMessageError(f"{operation} has the fields {sorted(fields)}, got {_named(message)}")
    for name, field in fields.items():
        if not field.allows(message[name]):
            value = repr(message[name])[:100]
            raise InvalidMessageError(f"{name} of {operation} must be {field.what}, got {value} instead")


def _named(message: dict) -> str:
    return str(sorted(map(str, message)))[:_MOST_TEXT]


Handler = Callable[..., Any]
"""A coroutine function."""


def checked(operation: str, handler: Handler) -> Handler:
    """A handler of Dask's that is called with valid messages only; of others the sender hears."""

    async def handle(**message: Any) -> Any:
        _refuse_other_version(operation, message)
        refuse_invalid(operation, message)
        try:
            return await handler(**message)
        except DaskpsError as error:  # for the sender; Dask would print a traceback here too
            logger.info("refused %s: %s", operation, error)
            return error_message(error, status="uncaught-error")

    return handle


def _refuse_other_version(operation: str, message: dict) -> None:
    """Whatever else another version of the client says, this is what is wrong."""
    version = message.get("version")
    if operation == OPEN and _is_text(version) and version != daskps.__version__:
        raise InstallationError(
            f"The scheduler has daskps {daskps.__version__} and the client has {version}: install"
            f" daskps {version} in the scheduler's environment and restart it."
        )


def ignoring(operation: str, handler: Handler) -> Handler:
    """A handler of a stream, which cannot answer: messages that are not valid are only logged."""

    async def handle(**message: Any) -> None:
        try:
            refuse_invalid(operation, message)
        except InvalidMessageError as error:
            logger.warning("ignored a message: %s", error)
            return
        await handler(**message)

    return handle
