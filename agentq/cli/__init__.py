"""The `agentq` command: one module a group of commands, imported when it is used."""
