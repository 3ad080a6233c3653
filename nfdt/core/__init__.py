"""The floor that client, nfdt and hfdt share."""
