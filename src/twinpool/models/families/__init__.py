"""Model families that can be served: one file each, which says how a decoder of transformers becomes one of ours."""
