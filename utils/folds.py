"""Moved: python -m extras.folds."""

raise SystemExit("python -m utils.folds is now: python -m extras.folds")
