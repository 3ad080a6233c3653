"""How processes of the cluster are started."""
