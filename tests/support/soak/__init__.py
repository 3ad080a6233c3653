"""A randomised long run of ``nfdt chaos``: ``scripts/soak``."""
