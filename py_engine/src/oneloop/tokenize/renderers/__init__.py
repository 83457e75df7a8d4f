"""One file per way of writing prompts. Each has a `kind`: its name, what it recognises, how it is made."""
