"""The settings: one file for each package that reads them, and shared.py for several.

settings/train.py and settings/scripts.py combine them for the scripts.
"""
