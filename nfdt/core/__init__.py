"""Foundation shared by client, nfdt and hfdt."""
