"""`python -m halfmoon` is the command line, as `halfmoon` is."""

import sys

from halfmoon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
