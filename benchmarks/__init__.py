"""Benchmarks: measured by hand, both sides in one call; never timed tests."""
