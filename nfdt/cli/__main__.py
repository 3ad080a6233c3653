"""``python -m nfdt.cli``."""

from nfdt.cli import main

main()
