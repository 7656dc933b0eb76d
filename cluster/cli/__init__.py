"""The command line: a module a command, put together in `main`."""
