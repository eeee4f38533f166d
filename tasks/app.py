"""The Celery app, `agentq.tasks.app:app`: configured from the environment, with the tasks that a worker answers."""

from agentq.config.celery import celery_app
from agentq.config.settings import load_settings

settings = load_settings()

app = celery_app(settings)
app.conf.imports = ("agentq.tasks.steps", "agentq.tasks.control", "agentq.tasks.worker")
