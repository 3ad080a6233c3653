"""Clusters of other systems that start slots: Ray, Kubernetes."""
