"""Differences between ranks: what is compared, by whom a difference is decided, and how it is told."""
