"""What Celery is set to."""

import pytest
from celery.app.defaults import SETTING_KEYS

from agentq.config.celery import celery_app, celery_config, step_limit_seconds
from agentq.config.settings import Settings
from agentq.domain.errors import ConfigurationError

SETTINGS = Settings(broker_url="redis://broker")


def test_every_setting_is_one_that_celery_knows() -> None:
    """Celery ignores what it doesn't know, a misspelt late ack too."""
    assert set(celery_config(SETTINGS)) - SETTING_KEYS == set()


def test_nothing_on_the_broker_is_named_as_another_prefix_names_it() -> None:
    """Two deployments on one Redis must not take each other's messages, events or commands."""
    ours = _names(SETTINGS)
    others = _names(Settings(broker_url="redis://broker", key_prefix="other"))
    assert ours & others == set()


def test_the_broker_brings_a_step_back_later_than_it_can_last() -> None:
    """Earlier, it would only make noise."""
    assert SETTINGS.visibility_timeout_seconds > step_limit_seconds(SETTINGS, None)


def test_a_url_that_is_wrong_is_told_at_once() -> None:
    """Not by a worker that never connects."""
    with pytest.raises(ConfigurationError, match="takes no 'master'"):
        celery_app(Settings(broker_url="sentinel://one?master=mine"), set_as_current=False)


def _names(settings: Settings) -> set[str]:
    config = celery_config(settings)
    options = config["broker_transport_options"]
    names = {value for name, value in options.items() if name.endswith("_key")}
    names |= {part for queue in config["task_queues"] for part in (queue.name, queue.exchange.name, queue.routing_key)}
    return names | {config[name] for name in ("event_exchange", "event_queue_prefix", "control_exchange")}
