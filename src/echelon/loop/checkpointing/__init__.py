"""What a run saves and restores, when, and what it compares before it resumes."""
