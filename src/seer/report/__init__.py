"""Pictures and pages of runs, computed from their events."""
