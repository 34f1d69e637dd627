"""Grouped drafting: siblings of a prompt group are each other's drafts."""
