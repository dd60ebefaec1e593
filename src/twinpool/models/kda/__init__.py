"""Kimi Delta Attention: Kimi-Linear, Kimi-K3."""
