"""Every setting of agentq: read from the environment, typed, checked, each with the reason for its default."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentq.domain.errors import ConfigurationError

PREFIX = "AGENTQ_"
BROKER_SCHEMES = ("redis", "rediss", "valkey", "sentinel", "redis+socket")
DATABASE_SCHEMES = ("postgresql", "sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One field a setting; `AGENTQ_` plus its name in capitals sets it. Durations are seconds, sizes bytes."""

    home: Path = Path(".agentq")
    """Where the embedded default keeps its database, its Valkey and outcome files; relative to the current folder,
    so that two projects on one machine don't share state."""

    database_url: str = ""
    """Where runs live. Empty: SQLite in `home`, so that a first try needs no server."""

    broker_url: str = ""
    """Redis or Valkey, single or Sentinel. Empty: the Valkey that `agentq up` runs from `home`."""

    lease_url: str = ""
    """Where leases live. Empty: the broker's, one server less to run."""

    agents: tuple[str, ...] = ()
    """Modules that define agents and tools, comma-separated. Empty: a worker that serves none, which is refused."""

    key_prefix: str = "agentq"
    """Begins the name of every key and queue, so that two deployments can share one Redis."""

    lease_seconds: float = 15.0
    """How long a step stays its worker's without a heartbeat: long enough for a slow garbage collection or a busy
    machine, short enough that a dead worker's reads run again while a person still waits."""

    keeper_interval_seconds: float = 2.0
    """How often the keeper dispatches and reaps: part of every recovery time."""

    keeper_beside_worker: bool = True
    """Start a keeper with every worker, so that no deployment lacks one; more than one are harmless."""

    operation_deadline_seconds: float = 30.0
    """By when the call of a writing tool has ended, or its process; a tool may declare its own."""

    probe_deadline_seconds: float = 10.0
    """How long a tool's probe may take: it looks something up. One that hangs is ended with its process."""

    probes_max: int = 8
    """How often a write's probe is asked before a person is: with waits that double, for some minutes, which is
    as long as most receivers need to know."""

    model_timeout_seconds: float = 120.0
    """How long one model turn may take: long answers of slow models take a minute."""

    settle_patience_seconds: float = 60.0
    """How long an outcome is recorded again while the database is away: most failovers take less."""

    tries_max: int = 3
    """Requeues of a step whose call was made and failed in a retryable way: enough for a blink of a service."""

    crashes_max: int = 3
    """How often a step may lose its process: enough for a deploy and bad luck, few enough to stop a step that kills
    its process."""

    backoff_seconds: float = 1.0
    """The first wait before a retry; doubled for each further one, with full jitter, up to a minute."""

    patience_seconds: float = 3600.0
    """How long a step may wait for rate limits and open circuits, which cost no tries: providers reset by the hour."""

    hand_back_seconds: float = 60.0
    """How long a step is handed back for want of its agent or tool: the length of a rolling deploy's overlap."""

    backlog_max: int = 1000
    """First steps in a queue before new runs stay rows: seconds of work for a fleet, little memory for Redis."""

    visibility_timeout_seconds: float = 3600.0
    """When the broker delivers an unacknowledged message again. Safety doesn't rest on it; longer than every deadline
    it makes no noise, and the keeper recovers lost steps long before."""

    stop_grace_seconds: float = 210.0
    """How long your platform waits for a worker that it told to stop before it kills it (compose's `stop_grace_period`,
    Kubernetes' `terminationGracePeriodSeconds`): only compared with what the longest step needs, because a worker that
    is killed in the middle of a call leaves an unknown write. That is 190 with the other defaults."""

    input_bytes_max: int = 262_144
    """The largest input of a run: every model turn reads it again."""

    result_bytes_max: int = 16_777_216
    """The largest result of a step that is kept: a row that every later model turn loads."""

    turns_max: int = 1000
    """Model turns of one run: an agent that goes round in circles ends as a dead letter."""

    model_concurrency: int = 100
    """Threads of a model worker: its steps wait for the network."""

    tools_concurrency: int = 4
    """Processes of a tools worker: each may be killed alone when a call outlives its deadline."""

    openai_base_url: str = ""
    """Another endpoint that speaks the Chat Completions API. Empty: the SDK's own default."""

    notify_task: str = ""
    """A Celery task of yours that is sent when dead letters have come; its one argument says which. Empty: none, since
    nothing leaves the deployment unasked."""

    notify_queue: str = "celery"
    """Where that task is sent: Celery's own default, which a worker of yours serves if nothing else was said to it."""

    notify_command: str = ""
    """A command that is run when dead letters have come, split as a shell would, run without one, with JSON on its
    standard input. Empty: none."""

    notify_seconds: float = 30.0
    """How long that command may take: long enough to reach a slow web hook, short enough that the next isn't late."""

    flower_address: str = "127.0.0.1"
    """Where Flower listens: not beyond this machine unless credentials are set."""

    flower_port: int = 5555
    """Flower's own default."""

    flower_basic_auth: str = ""
    """`user:password`; needed for any address but loopback."""

    flower_read_only: bool = True
    """Terminating a task from a browser makes an unknown write of it."""

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home.absolute() / 'agentq.db'}"

    @property
    def effective_broker_url(self) -> str:
        return self.broker_url or embedded_broker_url(self.home)

    @property
    def effective_lease_url(self) -> str:
        return self.lease_url or self.effective_broker_url

    @property
    def notify_argv(self) -> tuple[str, ...]:
        """The words of the command that tells of dead letters."""
        return tuple(shlex.split(self.notify_command))

    def queue(self, name: str) -> str:
        """The queue of that name (`model`, `tools`, `isolated`, `control`)."""
        return f"{self.key_prefix}.{name}"


def embedded_broker_url(home: Path) -> str:
    """Where the Valkey of this home listens: on a socket in it, or where its `valkey.address` says, because the path of
    a socket has about 100 bytes and a URL not every character."""
    address = home / "valkey.address"
    return address.read_text().strip() if address.exists() else f"redis+socket://{home.absolute() / 'valkey.sock'}"


def environment_of(settings: Settings) -> dict[str, str]:
    """The variables that give another process these settings, wherever it is started: only what isn't the default."""
    absolute = replace(settings, home=settings.home.absolute())
    return {
        PREFIX + field.name.upper(): _written(getattr(absolute, field.name))
        for field in fields(Settings)
        if getattr(absolute, field.name) != field.default
    }


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this environment. Raises ConfigurationError that names the variable and what it takes."""
    known = {PREFIX + field.name.upper(): field for field in fields(Settings)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise ConfigurationError(_unknown(variable, sorted(known)))
        values[known[variable].name] = _parse(variable, text, known[variable].default)
    settings = Settings(**values)
    _check(settings)
    return settings


def _unknown(variable: str, known: list[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only a slip pays for it

    similar = get_close_matches(variable, known, n=1, cutoff=0.8)
    meant = f"did you mean {similar[0]}?" if similar else f"the settings are {', '.join(known)}"
    return f"unknown setting {variable}; {meant}"


def _parse(variable: str, text: str, default: object) -> object:
    try:
        match default:
            case bool():
                return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
            case int():
                return int(text)
            case float():
                return float(text)
            case tuple():
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case Path():
                return Path(text)
            case _:
                return text
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number of seconds"}[type(default)]
        raise ConfigurationError(f"{variable} is {text!r}; it takes {kind}") from None


def _written(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _check(settings: Settings) -> None:
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < float("inf"):
            raise ConfigurationError(f"{PREFIX}{field.name.upper()} is {value!r}; it must be greater than 0")
    _check_notifications(settings)
    _check_scheme("DATABASE_URL", settings.effective_database_url, DATABASE_SCHEMES)
    _check_scheme("BROKER_URL", settings.effective_broker_url, BROKER_SCHEMES)
    _check_scheme("LEASE_URL", settings.effective_lease_url, BROKER_SCHEMES)


def _check_notifications(settings: Settings) -> None:
    task, queue = settings.notify_task, settings.notify_queue
    if task and task.split() != [task]:
        raise ConfigurationError(f"{PREFIX}NOTIFY_TASK is {task!r}; it takes the name of a Celery task")
    if queue.split() != [queue]:
        raise ConfigurationError(f"{PREFIX}NOTIFY_QUEUE is {queue!r}; it takes the name of a queue")
    if not settings.notify_command:
        return
    try:
        argv = settings.notify_argv
    except ValueError as error:
        # Not the command itself: it may hold the address of a web hook.
        raise ConfigurationError(f"{PREFIX}NOTIFY_COMMAND can't be split into words: {error}") from None
    if not argv or not argv[0]:
        raise ConfigurationError(f"{PREFIX}NOTIFY_COMMAND names no program")


def _check_scheme(name: str, url: str, schemes: tuple[str, ...]) -> None:
    scheme = urlsplit(url).scheme
    if scheme.partition("+")[0] not in {known.partition("+")[0] for known in schemes}:
        supported = ", ".join(f"{known}://" for known in schemes)
        raise ConfigurationError(f"{PREFIX}{name} begins with {scheme + ':'!r}; supported are {supported}")
