"""What all tests share."""

from hypothesis import settings

# A loaded machine makes any single example slow; the limit on the whole test remains.
settings.register_profile("nfdt", deadline=None)
settings.load_profile("nfdt")
