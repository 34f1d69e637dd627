"""What happened: one event schema, its files, and the numbers computed from it."""
