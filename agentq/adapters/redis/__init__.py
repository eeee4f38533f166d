"""Redis or Valkey: leases, and nudges for the keeper."""
