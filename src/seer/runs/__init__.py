"""One run: prompts in; responses with text and rewards, and a journal, out."""
