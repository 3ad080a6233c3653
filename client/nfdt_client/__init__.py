"""The client shim: capture fit, ship it, mirror what happens."""
