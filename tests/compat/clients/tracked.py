"""`tinkex` with packages of another environment beside ours: `tracked.py SITE-PACKAGES ARGUMENTS`."""

import sys

from tinkex.cli import main

if __name__ == "__main__":
    sys.path.append(sys.argv.pop(1))  # last: our own versions come first
    main()
