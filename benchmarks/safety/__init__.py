"""What `benchmarks.write_safety` is made of: the outside world, the systems, the kills, the verdict and the picture."""
