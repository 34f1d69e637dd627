# SPDX-License-Identifier: Apache-2.0
"""`python -m seer` is the `seer` command."""

import sys

from seer.cli.main import main

sys.exit(main())
