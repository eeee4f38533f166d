"""What the core asks of the world: Protocols that speak in transitions, and the data they take and give."""
