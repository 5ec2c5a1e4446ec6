"""An MLX repository becomes evidence: it loads, it generates."""
