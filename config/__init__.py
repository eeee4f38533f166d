"""What can be set, and what Celery and Flower are set to: settings, celery, flower, transport."""

if __name__ == "config":
    raise ImportError("import agentq.config, not config: this folder belongs to the agentq package")
