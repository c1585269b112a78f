"""Text generation: prompts from records or flags, and answers token by token."""
