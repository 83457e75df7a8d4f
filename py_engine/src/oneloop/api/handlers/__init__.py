"""One file per route: parse, ask the engine, encode."""
