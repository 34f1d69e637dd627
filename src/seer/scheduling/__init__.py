"""Which request runs next, where, and for how many tokens: one policy per file."""
