"""The Celery app, `agentq.tasks.app:app`: configured from the environment, with the tasks that a worker answers."""

from agentq.config.celery import celery_config
from celery import Celery

from agentq.config.settings import load_settings

settings = load_settings()

app = Celery("agentq")
app.conf.update(celery_config(settings))
app.conf.imports = ("agentq.tasks.steps", "agentq.tasks.control", "agentq.tasks.worker")
