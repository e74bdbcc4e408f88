"""The command line: one short file per verb. Each parses without torch and imports what it needs when it runs."""
