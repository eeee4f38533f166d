"""The product on real parts, in half a minute: a shop, an agent that works for it, a crash and a recovery."""
