"""Orders of the parts of a prompt: which ones a template allows, what each costs, which one is kept."""
