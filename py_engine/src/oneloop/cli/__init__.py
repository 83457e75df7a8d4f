"""The command line. `main` stays light: what a command needs is imported when it runs."""
