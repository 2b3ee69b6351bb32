"""`python -P -m engine.cli`: the `quintet` command of this very interpreter."""

import sys

from engine.cli import main

sys.exit(main())
