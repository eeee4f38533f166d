"""Read the URL of a Redis or Valkey: single or Sentinel, over TCP, TLS or a socket."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from agentq.domain.errors import ConfigurationError

SCHEMES = ("redis", "rediss", "valkey", "sentinel", "redis+socket")
TLS_OPTIONS = ("ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
SENTINEL_OPTIONS = ("master_name", "sentinel_username", "sentinel_password")
DEFAULT_PORTS = {"sentinel": 26379}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is. `nodes` are the Sentinels when `master_name` is set; `path` is a socket's, None over TCP."""

    nodes: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    tls_options: Mapping[str, str] = field(default_factory=dict)
    master_name: str | None = None
    sentinel_options: Mapping[str, str] = field(default_factory=dict, repr=False)


def parse_address(url: str) -> Address:
    """The parts of such a URL: `redis://[user:password@]host[:port][/database]`, `rediss://...?ssl_ca_certs=...`,
    `redis+socket:///path[?virtual_host=database]`, `sentinel://host[:port];sentinel://host[:port]?master_name=...`.

    Raises ConfigurationError that says what is wrong, without the password."""
    first, *others = url.split(";")
    scheme = urlsplit(first).scheme
    if scheme not in SCHEMES:
        raise ConfigurationError(
            f"{scheme or 'no scheme'!r} is not a kind of Redis; supported are {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if others and scheme != "sentinel":
        raise ConfigurationError(
            f"a {scheme}:// URL names one server; only sentinel:// takes several, with ';' between"
        )
    try:
        return _parse(scheme, [first, *others])
    except ValueError as error:
        raise ConfigurationError(f"the {scheme}:// URL can't be read: {error}") from None


def _parse(scheme: str, urls: list[str]) -> Address:
    parts = [urlsplit(url if "://" in url else f"{scheme}://{url}") for url in urls]
    options = {name: value for part in parts for name, value in parse_qsl(part.query)}
    first = parts[0]
    username, password = unquote(first.username or "") or None, unquote(first.password or "") or None
    if scheme == "redis+socket":
        database = options.pop("virtual_host", options.pop("db", "0"))
        _refuse_unknown(options, ())
        return Address(path=unquote(first.path), database=int(database), username=username, password=password)

    is_sentinel = scheme == "sentinel"
    _refuse_unknown(options, SENTINEL_OPTIONS if is_sentinel else TLS_OPTIONS if scheme == "rediss" else ())
    # Where the database stands after the last Sentinel, it is meant all the same.
    database = next((part.path.strip("/") for part in parts if part.path.strip("/")), "0")
    return Address(
        nodes=tuple((part.hostname or "localhost", part.port or DEFAULT_PORTS.get(scheme, 6379)) for part in parts),
        database=int(database),
        username=username,
        password=password,
        is_tls=scheme == "rediss",
        tls_options={} if is_sentinel else options,
        master_name=options.get("master_name", "mymaster") if is_sentinel else None,
        sentinel_options={
            name.removeprefix("sentinel_"): value for name, value in options.items() if name.startswith("sentinel_")
        },
    )


def _refuse_unknown(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"it takes no {unknown[0]!r}" + (f", only {', '.join(known)}" if known else ""))
