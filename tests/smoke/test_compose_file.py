"""What the compose file and the image promise, as far as it can be read: no secrets, no root, time to end well."""

import fnmatch
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agentq.cli.worker import ROLES
from agentq.config.celery import QUEUES, step_limit_seconds
from agentq.config.settings import Settings, load_settings
from tests.support.compose import (
    DOCKERFILE,
    ROOT,
    UnsetVariableError,
    compose_file,
    image_environment,
    interpolated,
    seconds,
)

VARIABLES = {
    "POSTGRES_PASSWORD": "one",
    "VALKEY_PASSWORD": "two",
    "FLOWER_BASIC_AUTH": "watcher:three",
    "AGENTQ_AGENTS": "shop",
}
KEEPER_STOP_SECONDS = 10  # How long a worker that ends waits for the keeper beside it.
ONE_SHOT = {"migrate"}
WRITTEN: dict[str, dict[str, Any]] = compose_file()["services"]
SERVICES: dict[str, dict[str, Any]] = interpolated(WRITTEN, VARIABLES)
OWN = [name for name, service in SERVICES.items() if service["image"] == "agentq"]
WORKERS = [name for name in OWN if "worker" in SERVICES[name]["command"]]


def texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from texts(inner)
        case list():
            for inner in value:
                yield from texts(inner)


def settings_of(name: str) -> Settings:
    environ = {**image_environment(), **SERVICES[name]["environment"]}
    return load_settings({variable: str(value) for variable, value in environ.items()})


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_missing_variable_stops_compose(variable: str) -> None:
    """An empty password would be one that everybody knows."""
    with pytest.raises(UnsetVariableError, match=f"^{variable}: set it to "):
        interpolated(WRITTEN, {name: value for name, value in VARIABLES.items() if name != variable})


@pytest.mark.parametrize("name", SERVICES)
def test_no_secret_is_written(name: str) -> None:
    """The file is read by everybody who can read the repository."""
    for variable, value in (WRITTEN[name].get("environment") or {}).items():
        if re.search(r"PASSWORD|SECRET|TOKEN|KEY|AUTH$", variable):
            assert re.fullmatch(r"\$\{\w+:[-?][^}]*\}", value), f"{variable} holds {value!r}"
    for text in texts(WRITTEN[name]):
        password = re.search(r"://[^/@:]*:([^@/]+)@", text)
        assert not password or password[1].startswith("${"), text


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_runs_as_root(name: str) -> None:
    """What breaks out of a container is then nobody outside of it."""
    if name in OWN:
        user = re.findall(r"^USER (\d+)(?::\d+)?$", DOCKERFILE.read_text(), re.MULTILINE)[-1]
    else:
        user = SERVICES[name]["user"]
    assert user not in ("0", "root", "")
    assert "no-new-privileges:true" in SERVICES[name]["security_opt"]
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert not SERVICES[name].get("privileged")


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in ONE_SHOT])
def test_a_service_is_watched_and_started_again(name: str) -> None:
    """A worker that hangs or ended at night is found by the engine, not by a customer."""
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert seconds(service["healthcheck"]["timeout"]) <= seconds(service["healthcheck"]["interval"])
    assert service["deploy"]["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", OWN)
def test_every_setting_is_one(name: str) -> None:
    """A slip in a variable's name would leave its default in force, unseen."""
    settings = settings_of(name)
    assert settings.home.is_absolute()
    assert str(settings.home) == "/var/lib/agentq"


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_time_to_record_its_longest_step(name: str) -> None:
    """One that is killed in the middle of a call leaves an unknown write for a person to look into."""
    settings = settings_of(name)
    role = ROLES[SERVICES[name]["command"][2]]
    longest = {
        "tools": step_limit_seconds(settings, None),
        "model": settings.model_timeout_seconds + settings.settle_patience_seconds,
        "control": 0.0,
    }
    longest["isolated"] = max(longest.values())
    needed = max(longest[queue] for queue in role.queues) + KEEPER_STOP_SECONDS
    assert seconds(SERVICES[name]["stop_grace_period"]) > needed


def test_every_queue_is_served() -> None:
    """A step in a queue that nobody reads would wait for ever."""
    served = [queue for name in WORKERS for queue in ROLES[SERVICES[name]["command"][2]].queues]
    assert sorted(served) == sorted(QUEUES)


def test_model_turns_run_in_threads_and_tools_in_processes() -> None:
    """A hundred turns wait for the network in one process; a call must be possible to end."""
    pools = {name: ROLES[SERVICES[name]["command"][2]].pool for name in WORKERS}
    assert pools == {"model": "threads", "tools": "prefork", "isolated": "prefork"}


def test_the_servers_keep_what_they_take() -> None:
    """An evicted lease, a lost fence: each is a write that may run twice."""
    valkey = SERVICES["valkey"]["command"]
    options = dict(zip(valkey[1::2], valkey[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--requirepass"] == VARIABLES["VALKEY_PASSWORD"]
    assert not [word for word in SERVICES["postgres"]["command"] if re.match(r"(fsync|synchronous_commit)=", word)]
    mounted = [volume.partition(":")[0] for name in ("valkey", "postgres") for volume in SERVICES[name]["volumes"]]
    assert set(mounted) <= set(compose_file()["volumes"])


def test_nothing_starts_before_the_schema_is_there() -> None:
    """A worker refuses a database without it, so it would only start over and over."""
    for name in [*WORKERS, "keeper"]:
        assert SERVICES[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
        assert SERVICES[name]["depends_on"]["valkey"]["condition"] == "service_healthy"
    assert SERVICES["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert SERVICES["migrate"]["restart"].startswith("on-failure")


def test_the_servers_are_reached_from_inside_only() -> None:
    """A database port on a public address is found within the hour."""
    assert compose_file()["networks"]["inside"]["internal"] is True
    for name in ("postgres", "valkey"):
        assert SERVICES[name]["networks"] == ["inside"]
        assert "ports" not in SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["flower"]["ports"])


def test_the_image_holds_the_whole_tree() -> None:
    """The package links to folders beside it: without them the links lead nowhere."""
    assert re.search(r"^COPY \. \.$", DOCKERFILE.read_text(), re.MULTILINE)
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    needed = ("agentq", "tasks", "config", "pyproject.toml", "README.md", "LICENSE")
    assert not [(name, pattern) for name in needed for pattern in patterns if fnmatch.fnmatch(name, pattern)]


def test_the_image_passes_signals_on() -> None:
    """A shell as process 1 would keep SIGTERM to itself, and the worker would be killed in the middle of a call."""
    dockerfile = DOCKERFILE.read_text()
    assert re.search(r'^ENTRYPOINT \["tini", "--"\]$', dockerfile, re.MULTILINE)
    assert not re.search(r"^(CMD|ENTRYPOINT) [^\[]", dockerfile, re.MULTILINE)
