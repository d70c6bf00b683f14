"""Many runs: sweeps, schedules, shrinking, reports, the audit of a dump."""

from typing import Final

DOORS: Final = ("dump_audit", "races", "report", "schedule", "shrink", "spark_sweeps", "story", "sweep", "verify")
