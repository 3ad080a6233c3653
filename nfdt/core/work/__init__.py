"""The worker protocol: instructions, messages, registration and artifacts, for every kind of worker."""
