"""Start processes and learn how they ended. Imports without torch; the elastic agent and the ranks load it."""
