"""Mamba1 (selective scan with a state per channel)."""
