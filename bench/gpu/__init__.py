"""Everything that only a GPU can show, in one command of at most eight minutes: `make gpu`. docs/gpu.md says how to read it."""
