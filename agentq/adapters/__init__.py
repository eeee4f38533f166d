"""The ports made real, one technology a module."""
