"""torchtnt.utils.module_summary."""

from echelon.loop.module_summary import ModuleSummary, get_module_summary, get_summary_table, prune_module_summary

__all__ = ["ModuleSummary", "get_module_summary", "get_summary_table", "prune_module_summary"]
