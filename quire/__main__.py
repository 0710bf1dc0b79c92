"""Runs the command `quire` for `python -m quire`."""

import sys

from quire.cli.main import main

sys.exit(main())
