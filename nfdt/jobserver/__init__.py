"""The job server process: jobs, slots, topologies, and the services that clients and slots call."""
