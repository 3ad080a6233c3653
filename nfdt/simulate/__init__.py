"""A cluster in one process under a virtual clock: the servers' own code, real gradients, simulated time.

The coordinator, the shards with their update rules and optimizers, the consistency policies, the schedulers, the
codecs, and the worker's pipeline run unchanged. Machines (the duration of gradients) and links (the duration of
transfers) are simulated. See docs/simulate.md.
"""
