"""Charts, tables and JSON of what a command found: for a terminal, as one page, as a file."""
