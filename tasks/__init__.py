"""What a worker answers: the Celery app and its tasks, each a thin call of a use case."""

if __name__ == "tasks":
    raise ImportError("import agentq.tasks, not tasks: this folder belongs to the agentq package")
