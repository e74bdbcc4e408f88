"""torchtnt.framework.callbacks.base_csv_writer."""

from echelon.loop.callbacks.csv_writer import BaseCSVWriter

__all__ = ["BaseCSVWriter"]
