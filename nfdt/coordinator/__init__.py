"""The coordinator of one job: a pure state machine without threads, locks or sockets."""
