"""Charts and HTML pages of runs, computed from their events."""
