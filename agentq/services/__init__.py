"""The use cases, one a module, named by its verb; they see the world through the ports only."""
