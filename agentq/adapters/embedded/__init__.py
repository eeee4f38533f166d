"""Everything on one machine: the servers that agentq brings along, and the supervision of its processes."""
