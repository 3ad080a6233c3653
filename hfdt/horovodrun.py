"""Documented name of :mod:`hfdt.launch.horovodrun`: ``python -m hfdt.horovodrun``."""

import sys

from hfdt.launch.horovodrun import main

if __name__ == "__main__":
    main(sys.argv[1:])
