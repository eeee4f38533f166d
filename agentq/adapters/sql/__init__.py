"""Runs, steps, audit log, dead letters in SQL: PostgreSQL in production, SQLite embedded."""
