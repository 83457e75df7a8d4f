"""`oneloop bench …`: one file per command. `oneloop.cli.bench` finds `main.main` through an entry point."""
