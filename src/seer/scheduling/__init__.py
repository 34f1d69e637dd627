"""Which request runs next, where, and for how many tokens: one scheduler per file."""
