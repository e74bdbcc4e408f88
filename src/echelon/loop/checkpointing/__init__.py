"""Checkpoints of a run: what is saved and restored, when, and what is compared before a run resumes."""
