"""The Horovod framework."""
