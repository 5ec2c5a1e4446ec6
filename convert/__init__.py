"""A source checkpoint becomes an MLX repository: read, name, plan, stream, write."""
