"""The page of a job server: jobs as they run, in a browser, and numbers for Prometheus. No Keras, no training code."""
