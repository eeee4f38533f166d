"""Run the Lua scripts of this folder: one round trip a call, sent by name once the server knows them."""

from collections.abc import Callable
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis import Redis, RedisError
from redis.exceptions import NoScriptError

from agentq.domain.errors import LeasesUnavailableError


class Script:
    """A script by the name of its file. Calling it raises LeasesUnavailableError when Redis is away or refuses."""

    __slots__ = ("_sha", "_text")

    def __init__(self, name: str) -> None:
        self._text = Path(__file__).with_name(f"{name}.lua").read_text()
        self._sha = sha1(self._text.encode()).hexdigest()

    def __call__(
        self,
        client: Redis,
        keys: list[str],
        *arguments: str | int,
        when_unknown: Callable[[], object] = lambda: None,
    ) -> Any:
        """`when_unknown` is called before a server is taught the script: it is another than before, or began anew."""
        try:
            try:
                return client.evalsha(self._sha, len(keys), *keys, *arguments)
            except NoScriptError:
                # A server that is new, restarted or flushed learns it by running it.
                when_unknown()
                return client.eval(self._text, len(keys), *keys, *arguments)
        except (RedisError, OSError) as error:
            raise unavailable(error) from error


def unavailable(error: Exception) -> LeasesUnavailableError:
    return LeasesUnavailableError(f"the lease store doesn't answer as it should ({type(error).__name__}: {error})")
