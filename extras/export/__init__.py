"""Formats of an exported model, and the model card."""
