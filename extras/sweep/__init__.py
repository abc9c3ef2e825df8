"""`sweep.py`: runs that differ in settings and seeds, and their comparison."""
