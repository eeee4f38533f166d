"""Asks models of OpenAI, or of any server that speaks the Chat Completions API, for their next reply."""

import os
import time
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentq.adapters.chat_completions import one_line, read_reply
from agentq.domain.errors import ConfigurationError
from agentq.domain.failures import (
    ModelConnectionError,
    ModelError,
    ModelNotFoundError,
    ModelReplyMalformedError,
    ModelTimeoutError,
)
from agentq.domain.model import ModelReply
from agentq.domain.retry_after import parse_retry_after
from agentq.ports.world import ModelRequest

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

CONNECT_SECONDS_MAX = 10.0  # A server that doesn't even take the connection won't answer in two minutes either.
CONNECTIONS_MAX = 1000  # More than the threads of any worker: a turn must never wait for another one's connection.
REPLY_BYTES_MAX = 33_554_432
NOT_FOUND = 404
PREFIX = "openai:"
KEY_VARIABLE = "OPENAI_API_KEY"
BASE_URL_VARIABLE = "OPENAI_BASE_URL"
NO_KEY = "none"  # Servers of one's own mostly ask for no key, but the SDK does.


class OpenAIModel:
    """A ModelClient. Any number of threads may share it; the SDK is imported at the first turn, and never retries.

    `base_url` None: OPENAI_BASE_URL, or OpenAI's own. The key comes from OPENAI_API_KEY; a server of one's own may do
    without.
    """

    def __init__(self, *, base_url: str | None = None) -> None:
        """Raises ConfigurationError for an address that is no HTTP URL."""
        self._base_url = base_url or os.environ.get(BASE_URL_VARIABLE) or None
        if self._base_url is not None:
            _check_url(self._base_url)
        self._lock = Lock()
        self._client: OpenAI | None = None
        self._client_process: int | None = None

    def complete(self, request: ModelRequest) -> ModelReply:
        """One request, one reply.

        It ends within `timeout_seconds`, or twice that if the server falls silent in the middle of its reply. Raises
        the ModelError family, and ConfigurationError without a key.
        """
        client = self._connected()
        import httpx2  # noqa: PLC0415 - the SDK takes long to import, and most processes ask no model
        import openai  # noqa: PLC0415 - as above

        ends_at = time.monotonic() + request.timeout_seconds
        timeout = httpx2.Timeout(request.timeout_seconds, connect=min(CONNECT_SECONDS_MAX, request.timeout_seconds))
        asked: dict[str, Any] = {"model": request.model.removeprefix(PREFIX), "messages": request.messages}
        if request.tools:  # The API refuses an empty list.
            asked["tools"] = request.tools
        try:
            with client.chat.completions.with_streaming_response.create(**asked, timeout=timeout) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > REPLY_BYTES_MAX:
                        raise ModelReplyMalformedError(f"the model's reply is longer than {REPLY_BYTES_MAX} bytes")
                    if time.monotonic() > ends_at:
                        raise _timed_out(request)
        except (openai.APITimeoutError, httpx2.TimeoutException) as error:
            raise _timed_out(request) from error
        except openai.APIStatusError as error:
            raise _of_status(error) from error
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            raise ModelConnectionError(
                f"can't reach the model's server: {one_line(error.__cause__ or error)}"
            ) from error
        except httpx2.DecodingError as error:
            raise ModelReplyMalformedError(f"can't decode the model's reply: {one_line(error)}") from error
        return read_reply(bytes(body))

    def _connected(self) -> "OpenAI":
        """The one client of this process: connections that a forked child shared would mix up replies."""
        with self._lock:
            if self._client is None or self._client_process != os.getpid():
                self._client = _make_client(self._base_url)
                self._client_process = os.getpid()
            return self._client


def _make_client(base_url: str | None) -> "OpenAI":
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key and base_url is None:
        raise ConfigurationError(
            f"{KEY_VARIABLE} is not set; set it, or AGENTQ_OPENAI_BASE_URL for a server that needs no key"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigurationError(f"{KEY_VARIABLE} holds characters that no key has; copy it again")
    import httpx2  # noqa: PLC0415 - the SDK takes long to import, and most processes ask no model
    import openai  # noqa: PLC0415 - as above

    return openai.OpenAI(
        api_key=key or NO_KEY,
        base_url=base_url,
        max_retries=0,  # The retry policy of the step decides; retries beneath it would multiply.
        http_client=openai.DefaultHttpxClient(
            limits=httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX // 10)
        ),
    )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigurationError(f"the model server's address is {url!r}; give an http:// or https:// URL")


def _timed_out(request: ModelRequest) -> ModelTimeoutError:
    return ModelTimeoutError(f"the model {request.model!r} gave no reply within {request.timeout_seconds:g} seconds")


def _of_status(error: "APIStatusError") -> ModelError:
    body = error.body
    detail = body.get("message") if isinstance(body, dict) else None
    message = f"the model's server answered {error.status_code}: {one_line(detail or body or error.message)}"
    if error.status_code == NOT_FOUND:
        return ModelNotFoundError(message, status=error.status_code)
    return ModelError(message, status=error.status_code, retry_after_seconds=parse_retry_after(error.response.headers))
