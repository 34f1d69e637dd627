# SPDX-License-Identifier: Apache-2.0
"""Charts and HTML pages of runs, computed from their events."""
