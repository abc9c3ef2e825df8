"""The settings: one file for each package that reads them. train.py and scripts.py put them
together for each script.
"""
