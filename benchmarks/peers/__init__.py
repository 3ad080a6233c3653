"""Programs for comparison: hand-written loops, strategies of tf_keras, and their processes and environments."""
