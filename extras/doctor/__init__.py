"""What doctor.py checks."""
