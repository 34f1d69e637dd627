"""How many draft tokens a step may verify, and what became of them."""
