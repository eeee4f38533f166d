"""Reads the reply of a server that speaks the Chat Completions API, trusting nothing in it."""

import json
from collections.abc import Mapping
from typing import Any

from agentq.domain.failures import ModelError, ModelReplyMalformedError, ModelReplyRefusedError
from agentq.domain.model import ModelReply, ToolCall, Usage
from agentq.domain.replies import with_own_ids

SHOWN_TEXT_LENGTH_MAX = 300

# `stop` with calls is what some servers say; the calls are what counts.
_WHOLE = ("stop", "tool_calls")
_REFUSALS = {
    "length": "the reply was cut at the token limit; raise the limit, or ask for less",
    "content_filter": "the reply was withheld by the provider's content filter",
}


def read_reply(body: bytes) -> ModelReply:
    """The reply in this body, each call with an id of its own.

    Raises ModelReplyRefusedError for one that was cut or withheld, ModelError for one that ended in a way nobody knows,
    and ModelReplyMalformedError for what isn't a reply, or says nothing.
    """
    document = _parsed(body)
    choice = _first_choice(document)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise _malformed("a choice without a message", body)
    _check_finish(choice.get("finish_reason"))
    text = _text(message)
    calls = tuple(_call(call) for call in _list(message.get("tool_calls")))
    if not text and not calls:
        raise _malformed("neither text nor tool calls", body)
    return with_own_ids(ModelReply(text=text or None, tool_calls=calls, usage=_usage(document.get("usage"))))


def one_line(text: object) -> str:
    """The text on one line, shortened: what servers say goes into errors that people read."""
    line = " ".join(str(text).split())
    return line if len(line) <= SHOWN_TEXT_LENGTH_MAX else line[:SHOWN_TEXT_LENGTH_MAX] + "..."


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise _malformed("a body that is not JSON", body) from None
    if not isinstance(document, dict):
        raise _malformed("a body that is not a JSON object", body)
    error = document.get("error")
    if isinstance(error, dict) and not document.get("choices"):  # Gateways report their upstream's failure like this.
        status = error.get("code") if isinstance(error.get("code"), int) else None
        raise ModelError(f"the model's server reported: {one_line(error.get('message') or error)}", status=status)
    return document


def _first_choice(document: Mapping[str, Any]) -> dict[str, Any]:
    choices = _list(document.get("choices"))
    if not choices or not isinstance(choices[0], dict):
        raise _malformed("a reply without choices", document)
    return choices[0]


def _check_finish(reason: object) -> None:
    if reason in _WHOLE:
        return
    if isinstance(reason, str) and reason in _REFUSALS:
        raise ModelReplyRefusedError(_REFUSALS[reason])
    raise ModelError(f"the model's reply ended with the finish_reason {reason!r}, which may mean that it is not whole")


def _text(message: Mapping[str, Any]) -> str:
    """Its text; a refusal is what the model has to say, too."""
    content = message.get("content")
    if isinstance(content, str):
        text = content
    else:
        texts = (part.get("text") for part in _list(content) if isinstance(part, dict))
        text = "".join(part for part in texts if isinstance(part, str))
    refusal = message.get("refusal")
    return text or (refusal if isinstance(refusal, str) else "")


def _call(call: object) -> ToolCall:
    """A call whose arguments are no JSON object is kept with what is wrong with it: the model is told."""
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    name, given_id = function.get("name"), call.get("id")
    arguments, error = _arguments(function.get("arguments"))
    return ToolCall(
        id=given_id if isinstance(given_id, str) else "",
        name=name if isinstance(name, str) else "",
        arguments=arguments,
        arguments_error=error,
    )


def _arguments(given: object) -> tuple[dict[str, Any], str | None]:
    if isinstance(given, dict):  # Some servers don't put it into a string.
        return given, None
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}, None  # How several models call a tool without arguments.
    if not isinstance(given, str):
        return {}, f"the arguments are {type(given).__name__}; give a JSON object"
    try:
        arguments = json.loads(given)
    except (ValueError, RecursionError) as error:
        return {}, f"the arguments are not JSON ({one_line(error)}): {one_line(given)}"
    if not isinstance(arguments, dict):
        return {}, f"the arguments are not a JSON object: {one_line(given)}"
    return arguments, None


def _usage(usage: object) -> Usage:
    counts = usage if isinstance(usage, dict) else {}
    return Usage(
        input_tokens=_count(counts.get("prompt_tokens")), output_tokens=_count(counts.get("completion_tokens"))
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _malformed(what: str, shown: object) -> ModelReplyMalformedError:
    text = shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown
    return ModelReplyMalformedError(f"the model's server answered with {what}: {one_line(text)}")
