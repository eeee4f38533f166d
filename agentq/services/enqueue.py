"""Start runs: check what a person or another service asks for, store it, and wake a worker if the broker has room.

SQL comes first: once a run is stored it will be executed, whatever becomes of the broker.
"""

import difflib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from agentq.domain.errors import AgentqError, IdempotencyConflictError, InvalidInputError, UnknownAgentError
from agentq.domain.model import Json
from agentq.ports.dispatch import Dispatcher
from agentq.ports.runs import NewRun, RunStore, ServedAgent
from agentq.services.publish import publish_within

BATCH_RUNS = 500  # Runs of one transaction: far below the parameter limits of both databases.
KEY_CHARACTERS_MAX = 200  # Fits an index of either database whatever the script.
METADATA_ENTRIES_MAX = 32
METADATA_KEY_CHARACTERS_MAX = 64
METADATA_VALUE_CHARACTERS_MAX = 1000
AGENTS_NAMED_MAX = 20
SILENT_SECONDS = 60.0  # A worker shows itself several times a minute; one that doesn't is gone or badly stuck.

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_INPUT_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueRequest:
    """One run to be, as somebody asked for it; nothing of it is checked yet."""

    agent: str
    input: Json
    idempotency_key: str | None = None
    metadata: Mapping[str, str] | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """A run that is stored. `is_new` False: its idempotency key had it before. `warning` is a line for a person."""

    run_id: str
    is_new: bool
    warning: str | None = None


def new_run_id() -> str:
    """A new run's id: 32 hex digits in the shape of UUID version 7, so that ids sort by the time they were made."""
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    fraction = rest * 4096 // 1_000_000  # The 12 bits below the millisecond keep one process's ids in order.
    tail = int.from_bytes(os.urandom(8), "big") & 0x3FFF_FFFF_FFFF_FFFF | 0x8000_0000_0000_0000
    return f"{milliseconds & 0xFFFF_FFFF_FFFF:012x}7{fraction:03x}{tail:016x}"


def enqueue(
    requests: Iterable[EnqueueRequest], *, runs: RunStore, dispatcher: Dispatcher, backlog_max: int
) -> list[Enqueued]:
    """Store every run, in batches of one transaction each, and publish first steps while the queue is short.

    Everything is checked before anything is stored. The broker may be away: then the dispatcher feeds it later.
    Raises InvalidInputError (also UnknownAgentError, IdempotencyConflictError), StoreUnavailableError.
    """
    served = runs.agents()
    checked = [check(request, served) for request in requests]
    enqueued: list[Enqueued] = []
    for batch in _batches(checked):
        try:
            added = runs.add(batch)
        except AgentqError as error:
            if enqueued:
                error.add_note(f"{len(enqueued)} runs are stored already; with idempotency keys, calling again is safe")
            raise
        wakeups = [one.wakeup for one in added if one.wakeup]
        is_broker_there = publish_within(wakeups, runs=runs, dispatcher=dispatcher, backlog_max=backlog_max)
        enqueued += [
            Enqueued(run_id=one.run_id, is_new=one.is_new, warning=_warning(served[run.agent], is_broker_there))
            for one, run in zip(added, batch, strict=True)
        ]
    return enqueued


def enqueue_message(
    message: Mapping[str, Any], message_id: str, *, runs: RunStore, dispatcher: Dispatcher, backlog_max: int
) -> Enqueued:
    """Start the run that a message asks for; what can't be started becomes a run that failed with its reason.

    The message's id stands in for a missing idempotency key: a message that is delivered again finds its own run.
    Returns once the run, or the refusal, is stored. Raises StoreUnavailableError: neither is.
    """
    try:
        request = request_from(message)
        if request.idempotency_key is None:
            request = replace(request, idempotency_key=message_id)
        return enqueue([request], runs=runs, dispatcher=dispatcher, backlog_max=backlog_max)[0]
    except InvalidInputError as error:
        return _store_refusal(message, message_id, error, runs)


def request_from(message: Mapping[str, Any]) -> EnqueueRequest:
    """The request in a mapping that came from elsewhere. Raises InvalidInputError for a missing or unknown field."""
    known = [field.name for field in fields(EnqueueRequest)]
    unknown = [str(name) for name in message if name not in known]
    if unknown:
        raise InvalidInputError(f"unknown field {unknown[0]!r}; the fields are {', '.join(known)}")
    for name in ("agent", "input"):
        if name not in message:
            raise InvalidInputError(f"field {name!r} is missing; a run needs an agent and an input")
    return EnqueueRequest(**message)


def check(request: EnqueueRequest, served: Mapping[str, ServedAgent]) -> NewRun:
    """The run to store, its values in plain JSON. Raises InvalidInputError that names the field and the fix."""
    agent = _check_agent(request.agent, served)
    return NewRun(
        id=new_run_id() if request.run_id is None else check_run_id(request.run_id),
        agent=agent.name,
        input=_check_input(request.input, agent),
        idempotency_key=None if request.idempotency_key is None else check_idempotency_key(request.idempotency_key),
        metadata=None if request.metadata is None else _check_metadata(request.metadata),
    )


def check_run_id(value: object) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        raise InvalidInputError(
            f"run_id is {_shown(value)}; it takes 1 to 64 letters, digits, '-' or '_', beginning with a letter or digit"
        )
    return value


def check_idempotency_key(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"idempotency_key is {_shown(value)}; it takes a text")
    if not 0 < len(value) <= KEY_CHARACTERS_MAX:
        raise InvalidInputError(f"idempotency_key has {len(value)} characters; it takes 1 to {KEY_CHARACTERS_MAX}")
    if not value.isprintable():
        raise InvalidInputError(f"idempotency_key is {_shown(value)}; it takes printable characters only")
    return value


def _check_agent(name: object, served: Mapping[str, ServedAgent]) -> ServedAgent:
    if not isinstance(name, str):
        raise InvalidInputError(f"agent is {_shown(name)}; it takes the name of an agent")
    if name in served:
        return served[name]
    if not served:
        raise UnknownAgentError(
            f"unknown agent {_shown(name)}; no worker has registered any agent yet: start one with AGENTQ_AGENTS set"
        )
    similar = difflib.get_close_matches(name, served, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    listed = ", ".join(sorted(served)[:AGENTS_NAMED_MAX]) + (", ..." if len(served) > AGENTS_NAMED_MAX else "")
    raise UnknownAgentError(f"unknown agent {_shown(name)}; {hint}agents that workers have served: {listed}")


def _check_input(value: object, agent: ServedAgent) -> Json:
    text = json_text("input", value)
    size_bytes = len(text.encode())
    if size_bytes > agent.input_bytes_max:
        raise InvalidInputError(
            f"input is {size_bytes:,} bytes of JSON; agent {agent.name!r} takes at most {agent.input_bytes_max:,}: "
            "pass a reference to the data instead"
        )
    plain: Json = json.loads(text)  # Tuples become lists and keys texts now, so that a repeat compares equal.
    return plain


def _check_metadata(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"metadata is {_shown(value)}; it takes an object of texts")
    if len(value) > METADATA_ENTRIES_MAX:
        raise InvalidInputError(f"metadata has {len(value)} entries; it takes at most {METADATA_ENTRIES_MAX}")
    for key, text in value.items():
        if not isinstance(key, str) or not 0 < len(key) <= METADATA_KEY_CHARACTERS_MAX or not key.isprintable():
            raise InvalidInputError(
                f"metadata has the key {_shown(key)}; keys are 1 to {METADATA_KEY_CHARACTERS_MAX} printable characters"
            )
        if not isinstance(text, str) or len(text) > METADATA_VALUE_CHARACTERS_MAX:
            raise InvalidInputError(
                f"metadata[{key!r}] is {_shown(text)}; "
                f"values are texts of at most {METADATA_VALUE_CHARACTERS_MAX} characters"
            )
        json_text(f"metadata[{key!r}]", text)
    return dict(value)


def json_text(name: str, value: object) -> str:
    """The value as JSON. Raises InvalidInputError that says by its name what can't be written as that."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{name} holds half of a surrogate pair; it takes valid Unicode text") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name} can't be written as JSON: {error}") from None
    return text


def _warning(agent: ServedAgent, is_broker_there: bool) -> str | None:
    if not is_broker_there:
        return "the broker can't be reached: the run is stored and starts when the broker is back"
    if agent.seen_seconds <= SILENT_SECONDS:
        return None
    return f"no worker serves agent {agent.name!r} right now: the run is queued and starts when one does"


def _store_refusal(message: Mapping[str, Any], message_id: str, error: InvalidInputError, runs: RunStore) -> Enqueued:
    """A refused message is a row with its reason, found by the key or id that it named where those are its own."""
    refused = NewRun(
        id=_legible_or(check_run_id, message.get("run_id"), _id_of_refusal(message_id)),
        agent=str(message.get("agent"))[:KEY_CHARACTERS_MAX].replace("\0", ""),
        input=_input_of_refusal(message.get("input")),
        idempotency_key=_legible_or(check_idempotency_key, message.get("idempotency_key"), message_id),
        error=str(error),
    )
    if not isinstance(error, IdempotencyConflictError):
        try:
            return _refused(runs.add([refused])[0].run_id, error)
        except IdempotencyConflictError as conflict:
            refused = replace(refused, error=f"{refused.error}; besides, {conflict}")
    # Its key or id belongs to another run, so the refusal is kept under names that can only be its own.
    refused = replace(refused, id=_id_of_refusal(message_id), idempotency_key=None)
    return _refused(runs.add([refused])[0].run_id, error)


def _refused(run_id: str, error: InvalidInputError) -> Enqueued:
    return Enqueued(run_id=run_id, is_new=False, warning=f"refused: {error}")


def _id_of_refusal(message_id: str) -> str:
    """The same for every delivery of one message, so that a redelivery adds no second row."""
    return hashlib.sha256(f"refused {message_id}".encode()).hexdigest()[:32]


def _input_of_refusal(value: object) -> Json:
    try:
        text = json_text("input", value)
    except InvalidInputError:
        return None
    return json.loads(text) if len(text) <= _INPUT_SHOWN_CHARACTERS else f"{text[:_INPUT_SHOWN_CHARACTERS]}..."


def _legible_or(check_value: Callable[[object], str], value: object, otherwise: str) -> str:
    try:
        return check_value(value)
    except InvalidInputError:
        return otherwise


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _INPUT_SHOWN_CHARACTERS else f"{text[:_INPUT_SHOWN_CHARACTERS]}..."


def _batches(runs: Iterable[NewRun]) -> Iterator[list[NewRun]]:
    rest = iter(runs)
    while batch := list(islice(rest, BATCH_RUNS)):
        yield batch
