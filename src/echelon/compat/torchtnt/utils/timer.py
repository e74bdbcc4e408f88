"""torchtnt.utils.timer."""

from echelon.loop.timer import (
    AggregatedTimer,
    BoundedTimer,
    FullSyncPeriodicTimer,
    TimedActionStats,
    Timer,
    TimerReport,
    get_durations_histogram,
    get_recorded_durations_table,
    get_synced_durations_histogram,
    get_synced_timer_histogram,
    get_timer_summary,
    log_elapsed_time,
)
from echelon.loop.timer import RecordingTimer as TimerProtocol

__all__ = [
    "AggregatedTimer",
    "BoundedTimer",
    "FullSyncPeriodicTimer",
    "TimedActionStats",
    "Timer",
    "TimerProtocol",
    "TimerReport",
    "get_durations_histogram",
    "get_recorded_durations_table",
    "get_synced_durations_histogram",
    "get_synced_timer_histogram",
    "get_timer_summary",
    "log_elapsed_time",
]
