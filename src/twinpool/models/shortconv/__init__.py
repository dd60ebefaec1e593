"""Short convolution: LFM2."""
