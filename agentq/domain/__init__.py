"""What a run is and how it may change: pure, with no clock, no I/O, no Celery and no SQL."""
