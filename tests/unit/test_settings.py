"""Settings: what an environment may say, and one clear line for everything else."""

import ast
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest

from agentq.config import settings as settings_module
from agentq.config.settings import PREFIX, Settings, environment_of, load_settings
from agentq.domain.errors import ConfigurationError

MODULE = Path(settings_module.__file__)
NAMES = [field.name for field in fields(Settings)]


def load(**variables: str) -> Settings:
    return load_settings({PREFIX + name: value for name, value in variables.items()})


def test_with_none_set_all_is_embedded() -> None:
    """A first try needs no server, and nothing outside of the current folder."""
    settings = load()
    assert settings == Settings()
    assert settings.effective_database_url == f"sqlite:///{Path('.agentq').absolute()}/agentq.db"
    assert settings.effective_broker_url == f"redis+socket://{Path('.agentq').absolute()}/valkey.sock"
    assert settings.effective_lease_url == settings.effective_broker_url


def test_an_embedded_valkey_may_listen_elsewhere(tmp_path: Path) -> None:
    """The path of a socket has about 100 bytes; some folders have more."""
    (tmp_path / "valkey.address").write_text("redis+socket:///elsewhere/valkey.sock\n")
    assert load(HOME=str(tmp_path)).effective_broker_url == "redis+socket:///elsewhere/valkey.sock"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("AGENTS", "shop.agents, more ,", ("shop.agents", "more")),
        ("AGENTS", "", ()),
        ("LEASE_SECONDS", "2", 2.0),
        ("LEASE_SECONDS", "1.5e1", 15.0),
        ("TRIES_MAX", " 7 ", 7),
        ("KEEPER_BESIDE_WORKER", "No", False),
        ("FLOWER_READ_ONLY", "1", True),
        ("HOME", "/data", Path("/data")),
        ("DATABASE_URL", "postgresql://db/agentq", "postgresql://db/agentq"),
        ("DATABASE_URL", "postgresql+psycopg://db/agentq", "postgresql+psycopg://db/agentq"),
        ("BROKER_URL", "valkey://broker:6379/0", "valkey://broker:6379/0"),
        ("LEASE_URL", "rediss://leases", "rediss://leases"),
        ("NOTIFY_TASK", "ops.page", "ops.page"),
        ("NOTIFY_COMMAND", "page --to 'ann b'", "page --to 'ann b'"),
    ],
)
def test_a_variable_is_read_as_what_it_is(variable: str, text: str, value: object) -> None:
    """Typed once, here; nobody parses again."""
    assert getattr(load(**{variable: text}), variable.lower()) == value


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("LEASE_SECOND", "2", "unknown setting AGENTQ_LEASE_SECOND; did you mean AGENTQ_LEASE_SECONDS?"),
        ("COLOUR", "2", "unknown setting AGENTQ_COLOUR; the settings are AGENTQ_AGENTS, "),
        ("LEASE_SECONDS", "soon", "AGENTQ_LEASE_SECONDS is 'soon'; it takes a number of seconds"),
        ("LEASE_SECONDS", "", "AGENTQ_LEASE_SECONDS is ''; it takes a number of seconds"),
        ("LEASE_SECONDS", "0", "AGENTQ_LEASE_SECONDS is 0.0; it must be greater than 0"),
        ("LEASE_SECONDS", "-1", "AGENTQ_LEASE_SECONDS is -1.0; it must be greater than 0"),
        ("LEASE_SECONDS", "nan", "AGENTQ_LEASE_SECONDS is nan; it must be"),
        ("LEASE_SECONDS", "inf", "AGENTQ_LEASE_SECONDS is inf; it must be"),
        ("TRIES_MAX", "2.5", "AGENTQ_TRIES_MAX is '2.5'; it takes a whole number"),
        ("TRIES_MAX", "0", "AGENTQ_TRIES_MAX is 0; it must be greater than 0"),
        ("KEEPER_BESIDE_WORKER", "maybe", "AGENTQ_KEEPER_BESIDE_WORKER is 'maybe'; it takes true or false"),
        ("DATABASE_URL", "mysql://db", "AGENTQ_DATABASE_URL begins with 'mysql:'; supported are postgresql://, sqlite"),
        ("BROKER_URL", "amqp://rabbit", "AGENTQ_BROKER_URL begins with 'amqp:'; supported are redis://, "),
        ("BROKER_URL", "localhost:6379", "AGENTQ_BROKER_URL begins with 'localhost:'; supported are redis://, "),
        ("BROKER_URL", "somewhere", "AGENTQ_BROKER_URL begins with "),
        ("NOTIFY_TASK", " ", "AGENTQ_NOTIFY_TASK is ' '; it takes the name of a Celery task"),
        ("NOTIFY_TASK", "two words", "AGENTQ_NOTIFY_TASK is 'two words'; it takes the name of a Celery task"),
        ("NOTIFY_QUEUE", "", "AGENTQ_NOTIFY_QUEUE is ''; it takes the name of a queue"),
        ("NOTIFY_COMMAND", "page 'ann", "AGENTQ_NOTIFY_COMMAND can't be split into words: No closing quotation"),
        ("NOTIFY_COMMAND", " ", "AGENTQ_NOTIFY_COMMAND names no program"),
        ("NOTIFY_COMMAND", "'' ann", "AGENTQ_NOTIFY_COMMAND names no program"),
        ("NOTIFY_SECONDS", "0", "AGENTQ_NOTIFY_SECONDS is 0.0; it must be greater than 0"),
        ("LEASE_URL", "memcached://x", "AGENTQ_LEASE_URL begins with 'memcached:'; supported are redis://, "),
    ],
)
def test_a_wrong_one_is_named_in_one_line(variable: str, text: str, says: str) -> None:
    """With what it takes: whoever reads it in a log knows what to do."""
    with pytest.raises(ConfigurationError) as caught:
        load(**{variable: text})
    message = str(caught.value)
    assert message.startswith(says) and "\n" not in message


def test_other_programs_variables_are_none_of_ours() -> None:
    """An environment is shared."""
    assert load_settings({"AGENTS": "x", "HOME": "/root", "agentq_agents": "y"}) == Settings()


def test_settings_are_passed_on_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's keeper, started elsewhere, must work on the same database."""
    monkeypatch.chdir(tmp_path)
    settings = replace(
        Settings(),
        agents=("one", "two"),
        lease_seconds=2.5,
        tries_max=9,
        keeper_beside_worker=False,
        broker_url="redis://h",
    )
    passed_on = load_settings(environment_of(settings))
    assert passed_on == replace(settings, home=tmp_path / ".agentq")


def test_only_what_differs_is_passed_on() -> None:
    """So that a log of the environment says something."""
    assert set(environment_of(Settings())) == {"AGENTQ_HOME"}


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_one_that_the_environment_could_give(name: str) -> None:
    """Whatever kind of value a new setting has, it can be set."""
    default = getattr(Settings(), name)
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    assert getattr(load(**{name.upper(): text}), name) == default


def test_every_setting_has_its_reason() -> None:
    """Whoever changes one must know what it was for."""
    [settings] = [each for each in ast.parse(MODULE.read_text()).body if getattr(each, "name", "") == "Settings"]
    assert isinstance(settings, ast.ClassDef)
    explained = [
        field.target.id
        for field, reason in pairwise(settings.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(reason, ast.Expr) and isinstance(reason.value, ast.Constant)
    ]
    assert explained == NAMES


def test_a_command_is_split_as_a_shell_would() -> None:
    """And is run without one: what is in it is no program of its own."""
    assert load(NOTIFY_COMMAND="page --to 'ann b' $(id)").notify_argv == ("page", "--to", "ann b", "$(id)")
    assert load().notify_argv == ()


def test_queues_and_keys_carry_the_prefix() -> None:
    """Two deployments can share one Redis."""
    assert load(KEY_PREFIX="shop").queue("tools") == "shop.tools"
