"""The command line: the only room that reads argv."""
