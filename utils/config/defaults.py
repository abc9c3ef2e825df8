"""The old place of utils/training/rates.py, for plug-ins."""

from utils.training.rates import RATES, Rates  # noqa: F401
