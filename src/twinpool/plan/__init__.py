"""The planner: devices, weights and the pools that fit beside them, without loading a model."""
