"""Moved: python -m extras.compare."""

raise SystemExit("python -m utils.report is now: python -m extras.compare")
