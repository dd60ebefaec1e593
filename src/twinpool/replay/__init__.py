"""Recorded and synthetic workloads: reading, describing and replaying them."""
