"""What a model's text says: reasoning, content and tool calls, taken apart while it comes. One output format a file."""
