"""One run: prompts in, groups with text, rewards and a journal out."""
