"""Moved: python -m extras.compare."""

import sys

print("python -m utils.report is now: python -m extras.compare", file=sys.stderr)
sys.exit(2)
