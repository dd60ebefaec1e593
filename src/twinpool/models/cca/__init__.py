"""Compressed convolutional attention of Zaya."""
