"""Gated DeltaNet: Qwen3-Next, Qwen3.5."""
