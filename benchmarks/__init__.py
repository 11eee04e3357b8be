"""What the package costs: each figure beside its target. ``python -m benchmarks --help``."""
