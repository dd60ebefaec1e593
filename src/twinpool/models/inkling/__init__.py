"""Inkling's short convolutions."""
