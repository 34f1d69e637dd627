"""`python -m seer` is the `seer` command."""

import sys

from seer.cli.main import main

sys.exit(main())
