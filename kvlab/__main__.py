"""`python -m kvlab` is `kvlab`, for when the command isn't on the path."""

import sys

from kvlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
