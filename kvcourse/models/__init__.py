"""Models in NumPy. The cache is an argument; without one, every pass starts from nothing."""
