"""Programs to compare with: loops written by hand, strategies of tf_keras, and their processes and environments."""
