"""AI-agent runs on Celery that never repeat a write they can't prove safe to repeat."""
