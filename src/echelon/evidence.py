"""What commands such as `report` find in the folder of a run, as values: for notebooks, and for programs that read runs."""

from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import read_times
from echelon.observe.goodput import goodput
from echelon.observe.stragglers import stragglers

__all__ = ["RunDir", "goodput", "read_times", "stragglers"]
