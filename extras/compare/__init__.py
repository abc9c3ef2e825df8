"""`python -m extras.compare`: runs side by side, with intervals of their differences."""
