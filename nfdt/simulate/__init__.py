"""A cluster in one process under a virtual clock: the servers' own code, real gradients, simulated time.

What runs unchanged is the coordinator, the shards with their update rules and optimizers, the consistency policies, the
schedulers, the codecs, and the worker's pipeline. Simulated are machines (how long a gradient takes) and links (how
long bytes take). See docs/simulate.md.
"""
