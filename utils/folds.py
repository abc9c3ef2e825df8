"""Moved: python -m extras.folds."""

import sys

print("python -m utils.folds is now: python -m extras.folds", file=sys.stderr)
sys.exit(2)
