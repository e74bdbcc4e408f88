"""The parts of the report's page: each takes facts and gives HTML.

All text from files counts as hostile, and is escaped in `text`.
"""
